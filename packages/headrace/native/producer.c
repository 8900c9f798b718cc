/* A producer whose delivery reports are taken by the event loop.

   A batch is the records of one call of `produce`. Each record has a report in the batch, whose address librdkafka
   gives back with the delivery report. The batch is complete when all its reports are known. */

#include "library.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

typedef struct Batch Batch;

typedef struct {
    Batch *batch;
    int64_t offset;
    int32_t partition;
    int16_t err;
    int8_t status; /* rd_kafka_msg_status_t: 0 not written, 1 perhaps, 2 written */
} Report;

struct Batch {
    Batch *before, *after; /* the others in flight of this producer */
    PyObject *request;
    Py_ssize_t first;  /* the index of its first record in the request */
    Py_ssize_t count;  /* records that librdkafka has taken */
    Py_ssize_t in_flight;
    int all_written;
    Report reports[];
};

typedef struct {
    PyObject_HEAD
    rd_kafka_t *client; /* NULL when closed */
    rd_kafka_t *handle; /* the same, for threads that have not got the interpreter's lock */
    rd_kafka_queue_t *queue;
    rd_kafka_event_t *event; /* delivery reports of which some are not yet taken */
    rd_kafka_topic_t *topic; /* that of the last record */
    Batch in_flight;         /* the head of a ring */
    int descriptor;          /* of the eventfd; it lives as long as the object, because a loop may watch it */
    int forks;               /* those before it was made */
    int is_producing;        /* `produce` is running: an attribute of a record may be Python's code */
    int waiting;             /* calls that wait for Kafka without the interpreter's lock */
    pthread_t hurry;         /* the thread that has records sent before `linger.ms` is over */
    sem_t hurried;           /* how often it was asked to */
    atomic_int is_ending;    /* whether it must end */
} Producer;

/* Returns whether a Python error is set. */
static int is_unusable(Producer *self) {
    const char *why = !self->client             ? "the producer is closed"
                      : self->forks != forks    ? "the producer belongs to the process that forked this one"
                      : self->is_producing      ? "the producer is in use"
                                                : NULL;
    if (why) PyErr_SetString(PyExc_ValueError, why);
    return why != NULL;
}

static void batch_destroy(Batch *batch) {
    batch->before->after = batch->after;
    batch->after->before = batch->before;
    Py_DECREF(batch->request);
    PyMem_Free(batch);
}

/* While `flush` waits, librdkafka lets no record linger. It blocks, so a thread calls it, which never needs the
   interpreter's lock. */
enum { FLUSH_MS = 20 };

static void *hurry(void *argument) {
    Producer *self = argument;
    while (!sem_wait(&self->hurried)) {
        while (!sem_trywait(&self->hurried)) {} /* once for all that has asked until now */
        if (self->is_ending) break;
        rdk.flush(self->handle, FLUSH_MS);
    }
    return NULL;
}

/* Writing ------------------------------------------------------------------------------------------------------------ */

static PyObject *names[6]; /* of the fields of an OutgoingRecord */
enum { TOPIC, KEY, VALUE, HEADERS, PARTITION, TIMESTAMP };
static const char *const field_names[] = {"topic", "key", "value", "headers", "partition", "timestamp_ms"};

static int data_of(PyObject *object, const void **data, Py_ssize_t *size) {
    *data = NULL;
    *size = 0;
    return object == Py_None ? 0 : PyBytes_AsStringAndSize(object, (char **)data, size);
}

/* Returns whether a Python error is set. */
static int headers_of(PyObject *list, rd_kafka_headers_t **headers) {
    *headers = NULL;
    if (list == Py_None) return 0;
    Py_ssize_t count = PySequence_Size(list);
    if (count < 1) return count < 0;
    *headers = rdk.headers_new(8);
    int failed = 0;
    for (Py_ssize_t at = 0; at < count && !failed; at++) {
        const char *name, *value;
        Py_ssize_t name_size, value_size;
        PyObject *pair = PySequence_GetItem(list, at);
        failed = !pair || !PyArg_ParseTuple(pair, "s#z#", &name, &name_size, &value, &value_size);
        if (!failed) rdk.header_add(*headers, name, name_size, value, value_size);
        Py_XDECREF(pair);
    }
    if (failed) rdk.headers_destroy(*headers);
    return failed;
}

/* Returns whether a Python error is set. */
static int choose_topic(Producer *self, PyObject *name) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(name, &size);
    if (!text) return 1;
    if (self->topic && !strcmp(rdk.topic_name(self->topic), text)) return 0;
    if (strlen(text) != (size_t)size || !size || size > 249) {
        PyErr_SetString(PyExc_ValueError, "not a valid topic name");
        return 1;
    }
    if (self->topic) rdk.topic_destroy(self->topic);
    self->topic = rdk.topic_new(self->client, text, NULL);
    if (!self->topic) PyErr_SetString(PyExc_ValueError, "librdkafka refused the topic");
    return !self->topic;
}

/* Gives a record to librdkafka. Returns its error, or ERR_INVALID_ARGUMENT with a Python error set. */
static int produce_record(Producer *self, PyObject *record, Report *report) {
    PyObject *fields[6] = {0};
    int err = ERR_INVALID_ARGUMENT, failed = 0;
    for (int at = 0; at < 6 && !failed; at++) failed = !(fields[at] = PyObject_GetAttr(record, names[at]));
    const void *key, *value;
    Py_ssize_t key_size, value_size;
    long partition = -1;
    long long timestamp = 0;
    rd_kafka_headers_t *headers = NULL;
    failed = failed || choose_topic(self, fields[TOPIC]) || data_of(fields[KEY], &key, &key_size) ||
             data_of(fields[VALUE], &value, &value_size);
    if (!failed && fields[PARTITION] != Py_None) partition = PyLong_AsLong(fields[PARTITION]);
    if (!failed) timestamp = PyLong_AsLongLong(fields[TIMESTAMP]);
    if (!failed && !PyErr_Occurred() && partition != (int32_t)partition)
        PyErr_SetString(PyExc_OverflowError, "the partition is too large");
    failed = failed || PyErr_Occurred() || headers_of(fields[HEADERS], &headers);
    if (!failed) {
        err = rdk.producev(
            self->client, V_RKT, self->topic, V_PARTITION, (int32_t)partition, V_VALUE, value, (size_t)value_size, V_KEY,
            key, (size_t)key_size, V_TIMESTAMP, (int64_t)timestamp, V_MSGFLAGS, COPY_VALUE, V_OPAQUE, report, V_HEADERS,
            headers, V_END);
        if (err && headers) rdk.headers_destroy(headers); /* else they belong to the record */
    }
    for (int at = 0; at < 6; at++) Py_XDECREF(fields[at]);
    return err;
}

/* An error of the client: its code, its text, and whether the client is of no more use. */
static PyObject *problem(Producer *self, int err, const char *text) {
    char fatal[512];
    int is_fatal = err == ERR_FATAL;
    if (is_fatal) err = rdk.fatal_error(self->client, fatal, sizeof fatal);
    return Py_BuildValue("(iNO)", err, text_of(is_fatal ? fatal : text), is_fatal ? Py_True : Py_False);
}

/* The index of a record that was not taken, with the problem or Python's exception. */
static PyObject *refusal(Producer *self, Py_ssize_t index, int err) {
    PyObject *type, *cause, *trace;
    if (!PyErr_Occurred()) return Py_BuildValue("(nN)", index, problem(self, err, rdk.err2str(err)));
    PyErr_Fetch(&type, &cause, &trace);
    PyErr_NormalizeException(&type, &cause, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return Py_BuildValue("(nN)", index, cause);
}

static PyObject *produce(Producer *self, PyObject *arguments) {
    PyObject *request, *records;
    Py_ssize_t first;
    int at_once;
    if (is_unusable(self) || !PyArg_ParseTuple(arguments, "OOnp", &request, &records, &first, &at_once)) return NULL;
    Py_ssize_t count = PySequence_Size(records);
    if (count < 0) return NULL;
    if (count > INT32_MAX) return PyErr_Format(PyExc_OverflowError, "%zd records are too many", count);
    Batch *batch = PyMem_Malloc(sizeof *batch + (size_t)count * sizeof(Report));
    if (!batch) return PyErr_NoMemory();
    *batch = (Batch){.before = &self->in_flight, .after = self->in_flight.after, .request = Py_NewRef(request),
                     .first = first, .all_written = 1};
    self->in_flight.after->before = batch;
    self->in_flight.after = batch;
    int err = 0;
    self->is_producing = 1;
    while (batch->count < count && !err) {
        Report *report = &batch->reports[batch->count];
        report->batch = batch;
        PyObject *record = PySequence_GetItem(records, batch->count);
        err = record ? produce_record(self, record, report) : ERR_INVALID_ARGUMENT;
        Py_XDECREF(record);
        if (!err) batch->count++;
    }
    self->is_producing = 0;
    batch->in_flight = batch->count; /* no report is taken before this call returns */
    Py_ssize_t taken = batch->count;
    if (!taken) batch_destroy(batch);
    if (taken && at_once) sem_post(&self->hurried);
    if (!err) Py_RETURN_NONE;
    return refusal(self, first + taken, err);
}

/* Reports ------------------------------------------------------------------------------------------------------------ */

/* The records of a batch that is written as a whole, as JSON: {"partition":0,"offset":1},... */
static PyObject *offsets_of(const Batch *batch) {
    enum { MOST = 56 }; /* {"partition":-2147483648,"offset":9223372036854775807}, */
    char *text = PyMem_Malloc((size_t)batch->count * MOST), *end = text;
    if (!text) return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < batch->count; at++) {
        const Report *report = &batch->reports[at];
        end += PyOS_snprintf(end, MOST, "{\"partition\":%d,\"offset\":%lld},", report->partition, (long long)report->offset);
    }
    PyObject *found = PyBytes_FromStringAndSize(text, end - text - 1);
    PyMem_Free(text);
    return found;
}

static PyObject *reports_of(const Batch *batch) {
    PyObject *list = PyList_New(batch->count);
    for (Py_ssize_t at = 0; list && at < batch->count; at++) {
        const Report *report = &batch->reports[at];
        PyObject *item = Py_BuildValue("(iiiL)", report->err, report->status, report->partition, (long long)report->offset);
        if (!item || PyList_SetItem(list, at, item)) Py_CLEAR(list);
    }
    return list;
}

static int take_report(PyObject *completed, const rd_kafka_message_t *message) {
    Report *report = message->opaque;
    Batch *batch = report->batch;
    report->offset = message->offset;
    report->partition = message->partition;
    report->err = (int16_t)message->err;
    report->status = (int8_t)rdk.message_status(message);
    batch->all_written &= !message->err && message->offset >= 0;
    if (--batch->in_flight) return 0;
    PyObject *found = batch->all_written ? offsets_of(batch) : reports_of(batch);
    int failed = !found || append(completed, Py_BuildValue("(OnnN)", batch->request, batch->first, batch->count, found));
    batch_destroy(batch);
    return failed;
}

static PyObject *event_of(Producer *self, rd_kafka_event_t *event, int type) {
    const char *facility, *line;
    int level;
    if (type == EVENT_ERROR) return problem(self, rdk.event_error(event), rdk.event_error_string(event));
    if (type == EVENT_STATS) return PyBytes_FromString(rdk.event_stats(event));
    if (type == EVENT_LOG && !rdk.event_log(event, &facility, &line, &level))
        return Py_BuildValue("(iN)", level, PyUnicode_FromFormat("%s [%s] %s", facility, rdk.name(self->client), line));
    return Py_NewRef(Py_None);
}

static PyObject *drain(Producer *self, PyObject *arguments) {
    Py_ssize_t most, taken = 0;
    if (is_unusable(self) || !PyArg_ParseTuple(arguments, "n", &most)) return NULL;
    /* First, so that what comes from now on makes the descriptor readable again. */
    uint64_t news;
    (void)!read(self->descriptor, &news, sizeof news);
    PyObject *completed = PyList_New(0), *events = PyList_New(0);
    int failed = !completed || !events;
    while (!failed && taken < most && (self->event || (self->event = rdk.queue_poll(self->queue, 0)))) {
        const rd_kafka_message_t *message = rdk.event_message_next(self->event);
        int type = message ? EVENT_DR : rdk.event_type(self->event);
        if (message) failed = take_report(completed, message);
        if (type != EVENT_DR) failed = append(events, event_of(self, self->event, type));
        taken += message || type != EVENT_DR;
        if (message) continue; /* there may be more in this event */
        rdk.event_destroy(self->event);
        self->event = NULL;
    }
    if (!failed) return Py_BuildValue("(NNO)", completed, events, taken < most ? Py_False : Py_True);
    Py_XDECREF(completed);
    Py_XDECREF(events);
    return NULL;
}

/* Transactions --------------------------------------------------------------------------------------------------------

   Calls that wait for Kafka without the interpreter's lock. Each report must be taken before a transaction ends. */

/* None, or an error: its code, its text, and whether it is fatal, may be tried again, and needs an abort. */
static PyObject *outcome(rd_kafka_error_t *error) {
    if (!error) Py_RETURN_NONE;
    PyObject *found = Py_BuildValue(
        "(iNNNN)", rdk.error_code(error), text_of(rdk.error_string(error)), PyBool_FromLong(rdk.error_is_fatal(error)),
        PyBool_FromLong(rdk.error_is_retriable(error)), PyBool_FromLong(rdk.error_txn_requires_abort(error)));
    rdk.error_destroy(error);
    return found;
}

static int add_offset(rd_kafka_topic_partition_list_t *offsets, PyObject *row) {
    const char *topic, *metadata;
    int partition;
    long long offset;
    if (!PyArg_ParseTuple(row, "siLs", &topic, &partition, &offset, &metadata)) return 1;
    rd_kafka_topic_partition_t *added = rdk.topic_partition_list_add(offsets, topic, partition);
    added->offset = offset;
    added->metadata = strdup(metadata);
    added->metadata_size = strlen(metadata) + 1; /* confluent-kafka reads it to its first zero byte, wherever that is */
    return 0;
}

static PyObject *transact(Producer *self, PyObject *arguments) {
    int milliseconds, failed = 0;
    PyObject *rows = NULL;
    const char *step, *member = "";
    Py_ssize_t size = 0;
    if (!PyArg_ParseTuple(arguments, "si|O!y#", &step, &milliseconds, &PyList_Type, &rows, &member, &size)) return NULL;
    if (is_unusable(self)) return NULL;
    rd_kafka_consumer_group_metadata_t *group = NULL;
    rd_kafka_topic_partition_list_t *offsets = rdk.topic_partition_list_new(0);
    rd_kafka_error_t *error = rows ? rdk.consumer_group_metadata_read(&group, member, (size_t)size) : NULL;
    for (Py_ssize_t at = 0; rows && at < PyList_Size(rows) && !failed; at++)
        failed = add_offset(offsets, PyList_GetItem(rows, at));
    if (!failed && !error) {
        self->waiting++;
        Py_BEGIN_ALLOW_THREADS;
        error = rows ? rdk.send_offsets_to_transaction(self->handle, offsets, group, milliseconds)
                : !strcmp(step, "init_transactions")  ? rdk.init_transactions(self->handle, milliseconds)
                : !strcmp(step, "begin_transaction")  ? rdk.begin_transaction(self->handle)
                : !strcmp(step, "commit_transaction") ? rdk.commit_transaction(self->handle, milliseconds)
                                                      : rdk.abort_transaction(self->handle, milliseconds);
        Py_END_ALLOW_THREADS;
        self->waiting--;
    }
    rdk.topic_partition_list_destroy(offsets);
    if (group) rdk.consumer_group_metadata_destroy(group);
    PyObject *found = outcome(error);
    if (failed) Py_CLEAR(found);
    return found;
}

/* Life --------------------------------------------------------------------------------------------------------------- */

static rd_kafka_conf_t *conf_of(PyObject *properties) {
    char text[512];
    rd_kafka_conf_t *conf = rdk.conf_new();
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(properties, &at, &name, &value)) {
        const char *key = PyUnicode_AsUTF8AndSize(name, NULL);
        const char *wanted = key ? PyUnicode_AsUTF8AndSize(value, NULL) : NULL;
        if (!wanted || rdk.conf_set(conf, key, wanted, text, sizeof text)) {
            if (wanted) PyErr_SetString(PyExc_ValueError, text);
            rdk.conf_destroy(conf);
            return NULL;
        }
    }
    rdk.conf_set_events(conf, EVENT_DR | EVENT_ERROR | EVENT_LOG | EVENT_STATS);
    rdk.conf_enable_sasl_queue(conf, 1); /* so a thread of librdkafka asks for tokens, and not the one that drains */
    return conf;
}

/* Ends the client; records without a report are lost. Releases the lock while threads of librdkafka end. A child leaves
   the client to its parent. */
static PyObject *producer_close(Producer *self, PyObject *ignored) {
    if (!self->client || self->forks != forks || self->is_producing || self->waiting) Py_RETURN_NONE;
    self->client = NULL;
    if (self->event) rdk.event_destroy(self->event);
    rdk.queue_io_event_enable(self->queue, -1, NULL, 0);
    rdk.queue_destroy(self->queue);
    if (self->topic) rdk.topic_destroy(self->topic);
    self->is_ending = 1;
    sem_post(&self->hurried);
    Py_BEGIN_ALLOW_THREADS;
    pthread_join(self->hurry, NULL);
    rdk.destroy(self->handle);
    Py_END_ALLOW_THREADS;
    while (self->in_flight.after != &self->in_flight) batch_destroy(self->in_flight.after);
    Py_RETURN_NONE;
}

/* Starts the thread; it gets no signals, which are Python's. Returns whether that failed. */
static int start_hurry(Producer *self) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&self->hurry, NULL, hurry, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) PyErr_SetString(PyExc_OSError, strerror(failed));
    return failed;
}

static int producer_init(Producer *self, PyObject *arguments, PyObject *keywords) {
    PyObject *properties;
    char text[512];
    if (!may_begin(self->descriptor) || !PyArg_ParseTuple(arguments, "O!", &PyDict_Type, &properties)) return -1;
    for (int at = 0; at < 6; at++)
        if (!names[at] && !(names[at] = PyUnicode_InternFromString(field_names[at]))) return -1;
    self->descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (self->descriptor < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    rd_kafka_conf_t *conf = conf_of(properties);
    if (!conf) return -1;
    rd_kafka_t *client = rdk.new(PRODUCER, conf, text, sizeof text);
    if (!client) {
        rdk.conf_destroy(conf);
        PyErr_SetString(PyExc_ValueError, text);
        return -1;
    }
    self->handle = client;
    self->forks = forks;
    sem_init(&self->hurried, 0, 0);
    if (start_hurry(self)) {
        rdk.destroy(client);
        return -1;
    }
    self->client = client;
    self->in_flight.before = self->in_flight.after = &self->in_flight;
    rdk.set_log_queue(client, NULL); /* the main queue */
    self->queue = rdk.queue_get_main(client);
    static const uint64_t one = 1; /* what an eventfd adds */
    rdk.queue_io_event_enable(self->queue, self->descriptor, &one, sizeof one);
    return 0;
}

static void producer_dealloc(Producer *self) {
    Py_XDECREF(producer_close(self, NULL));
    if (self->descriptor > 0) close(self->descriptor);
    free_object(self);
}

static PyObject *purge(Producer *self, PyObject *arguments) {
    int in_flight = 1;
    if (is_unusable(self) || !PyArg_ParseTuple(arguments, "|p", &in_flight)) return NULL;
    /* A thread of librdkafka may be busy with a name server for long. */
    rdk.purge(self->client, PURGE_QUEUE | PURGE_WITHOUT_WAIT | (in_flight ? PURGE_IN_FLIGHT : 0));
    Py_RETURN_NONE;
}

static PyObject *set_sasl_credentials(Producer *self, PyObject *arguments) {
    const char *user, *password;
    if (is_unusable(self) || !PyArg_ParseTuple(arguments, "ss", &user, &password)) return NULL;
    return outcome(rdk.sasl_set_credentials(self->client, user, password));
}

static PyObject *descriptor_of(Producer *self, PyObject *ignored) { return PyLong_FromLong(self->descriptor); }

static Py_ssize_t length(Producer *self) {
    return self->client && self->forks == forks ? rdk.outq_len(self->client) : 0;
}

static PyMethodDef methods[] = {
    {"produce", (PyCFunction)produce, METH_VARARGS,
     "produce(request, records, first, at_once): take records; return None, or the index of the first one that was not "
     "taken, with an exception or (code, text, is_fatal). Those after it were not looked at. With `at_once` they are sent "
     "before linger.ms is over."},
    {"drain", (PyCFunction)drain, METH_VARARGS,
     "drain(most): return ([(request, first, count, found)], events, whether more are due). `found` is the JSON of the "
     "offsets if these records are all written, else a list of (code, status, partition, offset). An event is (code, "
     "text, is_fatal) of an error, (level, line) of the log, the JSON of statistics, or None."},
    {"transact", (PyCFunction)transact, METH_VARARGS,
     "transact(step, milliseconds, offsets, member): do what librdkafka's function of this name does, which is init_, begin_, "
     "commit_ or abort_transaction(s), or send_offsets_to_transaction, which alone has offsets. Return None, or (code, text, "
     "is_fatal, is_retriable, needs_abort). Offsets are a list of (topic, partition, offset, metadata); `member` is what a "
     "consumer's `consumer_group_metadata` returns."},
    {"fileno", (PyCFunction)descriptor_of, METH_NOARGS, "Return the descriptor that is readable when reports are due."},
    {"purge", (PyCFunction)purge, METH_VARARGS, "purge(in_flight=True): have each waiting record reported as not written."},
    {"set_sasl_credentials", (PyCFunction)set_sasl_credentials, METH_VARARGS, "set_sasl_credentials(user, password)"},
    {"close", (PyCFunction)producer_close, METH_NOARGS,
     "End the client. Blocks until its threads have ended. During another call, do nothing: the last reference ends it."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Producer(properties): properties are a dict of texts, by the names of librdkafka."},
    {Py_tp_init, producer_init},
    {Py_tp_dealloc, producer_dealloc},
    {Py_tp_methods, methods},
    {Py_sq_length, length},
    {0},
};

PyType_Spec producer_spec = {"headrace.kafka._columns.Producer", sizeof(Producer), 0, Py_TPFLAGS_DEFAULT, slots};
