/* What a consumer has fetched, in columns and without an object for each record.

   confluent-kafka's Consumer stays the client: it joins the group, commits and calls back. The queues of its partitions
   are forwarded to a queue of ours. What arrives there is taken as events, for which librdkafka calls nothing back: a
   callback of confluent-kafka outside its own methods ends the process. All else stays in the client's own queue.

   What librdkafka guarantees, by its source: it drops records here that were fetched before a pause, a seek or a revoke
   (`rd_kafka_op_version_outdated`). It ends the forwarding when a partition stops, and starts none by itself once an
   application has forwarded the queue. So a partition is forwarded again after each assignment. */

#include "library.h"

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    PyObject *owner;           /* confluent-kafka's Consumer, which must not be closed before this */
    rd_kafka_t *client;        /* that of the owner */
    rd_kafka_queue_t *fetched; /* NULL when closed */
    rd_kafka_queue_t *events;  /* the client's own queue, to wait for */
    int descriptor;            /* of an eventfd: librdkafka adds to it when one of the queues is no longer empty */
    int forks;                 /* those before it was made */
    pthread_mutex_t in_use;    /* held while a call works without the interpreter's lock */
} FetchQueue;

/* Life --------------------------------------------------------------------------------------------------------------- */

/* Takes the client out of confluent-kafka's object, whose first field it is. NULL with a Python error if it is another
   object, or closed. */
static rd_kafka_t *client_of(PyObject *owner) {
    PyObject *module = PyImport_ImportModule("confluent_kafka.cimpl");
    PyObject *type = module ? PyObject_GetAttrString(module, "Consumer") : NULL;
    int fits = type ? PyObject_IsInstance(owner, type) : -1;
    Py_XDECREF(type);
    Py_XDECREF(module);
    if (fits < 0) return NULL;
    rd_kafka_t *client = fits ? *(rd_kafka_t **)((char *)owner + sizeof(PyObject)) : NULL;
    if (client && rdk.type(client) == CONSUMER) return client;
    PyErr_SetString(PyExc_ValueError, "not an open consumer of confluent-kafka");
    return NULL;
}

static int fetch_queue_init(FetchQueue *self, PyObject *arguments, PyObject *keywords) {
    static const uint64_t one = 1;
    PyObject *owner;
    if (!may_begin(self->owner != NULL) || !PyArg_ParseTuple(arguments, "O", &owner)) return -1;
    rd_kafka_t *client = client_of(owner);
    if (!client) return -1;
    self->descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (self->descriptor < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    pthread_mutex_init(&self->in_use, NULL);
    self->forks = forks;
    self->owner = Py_NewRef(owner);
    self->client = client;
    self->fetched = rdk.queue_new(client);
    self->events = rdk.queue_get_consumer(client);
    rdk.queue_io_event_enable(self->fetched, self->descriptor, &one, sizeof one);
    if (self->events) rdk.queue_io_event_enable(self->events, self->descriptor, &one, sizeof one);
    return 0;
}

/* Must come before the client is closed, which would wait for ever for records in the queue. Waits for a call of
   `consume` on another thread. */
static PyObject *fetch_queue_close(FetchQueue *self, PyObject *ignored) {
    if (!self->owner || self->forks != forks) Py_RETURN_NONE; /* a child leaves it to its parent */
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&self->in_use);
    Py_END_ALLOW_THREADS;
    if (self->fetched) {
        rdk.queue_io_event_enable(self->fetched, -1, NULL, 0);
        rdk.queue_destroy(self->fetched);
        self->fetched = NULL;
        if (self->events) {
            rdk.queue_io_event_enable(self->events, -1, NULL, 0);
            rdk.queue_destroy(self->events);
        }
        close(self->descriptor);
    }
    pthread_mutex_unlock(&self->in_use);
    Py_RETURN_NONE;
}

static void fetch_queue_dealloc(FetchQueue *self) {
    Py_XDECREF(fetch_queue_close(self, NULL));
    Py_XDECREF(self->owner);
    free_object(self);
}

static int is_closed(FetchQueue *self) {
    int is_open = self->fetched && self->forks == forks;
    if (!is_open) PyErr_SetString(PyExc_ValueError, "the queue is closed, or of the process that forked this one");
    return !is_open;
}

static PyObject *forward(FetchQueue *self, PyObject *arguments) {
    const char *topic;
    int partition;
    if (!PyArg_ParseTuple(arguments, "si", &topic, &partition) || is_closed(self)) return NULL;
    rd_kafka_queue_t *source = *topic && partition >= 0 ? rdk.queue_get_partition(self->client, topic, partition) : NULL;
    if (!source) return PyErr_Format(PyExc_ValueError, "%s-%d is not a partition", topic, partition);
    rdk.queue_forward(source, self->fetched);
    rdk.queue_destroy(source);
    Py_RETURN_NONE;
}

/* Records as columns ------------------------------------------------------------------------------------------------- */

static PyObject *bytes_or_none(const void *data, size_t size) {
    return data ? PyBytes_FromStringAndSize(data, (Py_ssize_t)size) : Py_NewRef(Py_None);
}

/* A name that is not UTF-8, as other languages may write it, is U+FFFD. */
static PyObject *header_name(const char *name) {
    PyObject *text = PyUnicode_DecodeUTF8(name, (Py_ssize_t)strlen(name), "strict");
    if (text || !PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) return text;
    PyErr_Clear();
    return PyUnicode_FromString("\xef\xbf\xbd");
}

/* None for a record without headers, which librdkafka mostly calls an empty list. */
static PyObject *headers_of(const rd_kafka_message_t *message) {
    rd_kafka_headers_t *headers;
    const char *name;
    const void *value;
    size_t size;
    if (rdk.message_headers(message, &headers) || rdk.header_get_all(headers, 0, &name, &value, &size))
        return Py_NewRef(Py_None);
    PyObject *list = PyList_New(0);
    for (size_t at = 0; list && !rdk.header_get_all(headers, at, &name, &value, &size); at++)
        if (append(list, Py_BuildValue("(NN)", header_name(name), bytes_or_none(value, size)))) Py_CLEAR(list);
    return list;
}

enum { OFFSETS, TIMESTAMPS, KEYS, VALUES, SIZES, HEADERS, COLUMNS };

/* Records of one partition that follow each other; without a topic there is none. */
typedef struct {
    rd_kafka_topic_t *topic;
    int32_t partition;
    int is_append_time; /* whether the broker chose the time of its first record */
    PyObject *columns[COLUMNS]; /* lists; that of the headers only if a record has some */
} Run;

/* The column begins with the first record that has headers. */
static int put_headers(Run *run, PyObject *headers) {
    PyObject **column = &run->columns[HEADERS];
    int failed = 0;
    if (headers == Py_None && !*column) return Py_DecRef(headers), 0;
    if (!*column) {
        failed = !(*column = PyList_New(0));
        for (Py_ssize_t at = PyList_Size(run->columns[OFFSETS]); !failed && at > 1; at--)
            failed = PyList_Append(*column, Py_None);
    }
    if (!failed) return append(*column, headers);
    Py_XDECREF(headers);
    return 1;
}

static int put_record(Run *run, const rd_kafka_message_t *message) {
    PyObject **columns = run->columns;
    int kind;
    return append(columns[OFFSETS], PyLong_FromLongLong(message->offset)) ||
           append(columns[TIMESTAMPS], PyLong_FromLongLong(rdk.message_timestamp(message, &kind))) ||
           append(columns[KEYS], bytes_or_none(message->key, message->key_size)) ||
           append(columns[VALUES], bytes_or_none(message->value, message->value_size)) ||
           append(columns[SIZES], PyLong_FromSize_t(message->key_size + message->value_size)) ||
           put_headers(run, headers_of(message));
}

static int begin_run(Run *run, const rd_kafka_message_t *message) {
    int kind, failed = 0;
    rdk.message_timestamp(message, &kind);
    *run = (Run){.topic = message->topic, .partition = message->partition, .is_append_time = kind == APPEND_TIME};
    for (int column = 0; column < HEADERS; column++) failed |= !(run->columns[column] = PyList_New(0));
    return failed;
}

static PyObject *part_of(Run *run) {
    PyObject **c = run->columns;
    return Py_BuildValue("(isiOOOOOOO)", 0, rdk.topic_name(run->topic), run->partition,
                         run->is_append_time ? Py_True : Py_False, c[OFFSETS], c[TIMESTAMPS], c[KEYS], c[VALUES],
                         c[HEADERS] ? c[HEADERS] : Py_None, c[SIZES]);
}

/* Appends the run, unless something failed, and ends it. */
static int end_run(PyObject *parts, Run *run, int failed) {
    failed = failed || (run->topic && append(parts, part_of(run)));
    for (int column = 0; column < COLUMNS; column++) Py_XDECREF(run->columns[column]);
    *run = (Run){0};
    return failed;
}

static PyObject *error_of(rd_kafka_event_t *event) {
    rd_kafka_topic_partition_t *at = rdk.event_topic_partition(event);
    PyObject *found = Py_BuildValue("(isiLN)", rdk.event_error(event), at ? at->topic : "", at ? at->partition : -1,
                                    at ? (long long)at->offset : -1LL, text_of(rdk.event_error_string(event)));
    if (at) rdk.topic_partition_destroy(at);
    return found;
}

static PyObject *parts_of(rd_kafka_event_t **events, ssize_t count) {
    PyObject *parts = PyList_New(0);
    Run run = {0};
    int failed = !parts;
    for (ssize_t at = 0; at < count && !failed; at++) {
        const rd_kafka_message_t *message = rdk.event_message_next(events[at]);
        if (!message || message->topic != run.topic || message->partition != run.partition)
            failed = end_run(parts, &run, 0) || (message && begin_run(&run, message));
        failed = failed || (message ? put_record(&run, message) : append(parts, error_of(events[at])));
    }
    if (end_run(parts, &run, failed)) Py_CLEAR(parts);
    return parts;
}

/* Takes what is there, and waits only if that is nothing. */
static ssize_t take(FetchQueue *self, rd_kafka_event_t **events, ssize_t most, int milliseconds) {
    uint64_t news;
    struct pollfd wait = {.fd = self->descriptor, .events = POLLIN};
    ssize_t count = 0;
    for (int has_waited = !milliseconds;; has_waited = 1) {
        while (count < most && (events[count] = rdk.queue_poll(self->fetched, 0))) count++;
        if (count || has_waited) return count;
        poll(&wait, 1, milliseconds);
        (void)!read(self->descriptor, &news, sizeof news);
    }
}

static PyObject *consume(FetchQueue *self, PyObject *arguments) {
    enum { MOST = 100000 };
    int most;
    double seconds;
    if (!PyArg_ParseTuple(arguments, "id", &most, &seconds) || is_closed(self)) return NULL;
    if (most < 1 || most > MOST || !(seconds >= 0 && seconds <= 3600))
        return PyErr_Format(PyExc_ValueError, "use 1 to %d records and 0 to 3600 seconds", MOST);
    rd_kafka_event_t **events = malloc((size_t)most * sizeof *events);
    if (!events) return PyErr_NoMemory();
    ssize_t count = 0;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&self->in_use);
    if (self->fetched) count = take(self, events, most, (int)(seconds * 1000));
    Py_END_ALLOW_THREADS;
    PyObject *parts = parts_of(events, count);
    Py_BEGIN_ALLOW_THREADS;
    for (ssize_t at = 0; at < count; at++) rdk.event_destroy(events[at]);
    pthread_mutex_unlock(&self->in_use);
    free(events);
    Py_END_ALLOW_THREADS;
    return parts;
}

static PyMethodDef methods[] = {
    {"forward", (PyCFunction)forward, METH_VARARGS,
     "forward(topic, partition): have the records of an assigned partition arrive here, from now on."},
    {"consume", (PyCFunction)consume, METH_VARARGS,
     "consume(most, seconds): return at most so many records, in parts; wait until there is one or the client's `poll` "
     "has something to do. A part is (0, topic, partition, is_append_time, offsets, timestamps, keys, values, headers or "
     "None, sizes) or an error of a partition: (code, topic, partition, offset, text)."},
    {"close", (PyCFunction)fetch_queue_close, METH_NOARGS, "Drop what was fetched. Must come before the client is closed."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "FetchQueue(client): the records of a confluent_kafka.Consumer, in columns."},
    {Py_tp_init, fetch_queue_init},
    {Py_tp_dealloc, fetch_queue_dealloc},
    {Py_tp_methods, methods},
    {0},
};

PyType_Spec consumer_spec = {"headrace.kafka._columns.FetchQueue", sizeof(FetchQueue), 0, Py_TPFLAGS_DEFAULT, slots};
