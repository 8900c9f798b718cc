/* What a consumer has fetched, in columns and without an object for each record.

   confluent-kafka's Consumer stays the client: it joins the group, commits and calls back. The queues of its partitions
   are forwarded to a queue of ours. What arrives there is taken as events, for which librdkafka calls nothing back: a
   callback of confluent-kafka outside its own methods ends the process. All else stays in the client's own queue.

   What librdkafka guarantees, by its source: it drops records here that were fetched before a pause, a seek or a revoke
   (`rd_kafka_op_version_outdated`). It ends the forwarding when a partition stops, and starts none by itself once an
   application has forwarded the queue. So a partition is forwarded again after each assignment. */

#include "library.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    PyObject *owner;           /* confluent-kafka's Consumer, which must not be closed before this */
    rd_kafka_t *client;        /* that of the owner */
    rd_kafka_queue_t *fetched; /* NULL when closed */
    rd_kafka_queue_t *events;  /* the client's own queue, to wait for */
    int readable, writable;    /* a pipe: librdkafka writes a byte when one of the queues is no longer empty */
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

static int set_flags(int descriptor) {
    return fcntl(descriptor, F_SETFL, O_NONBLOCK) || fcntl(descriptor, F_SETFD, FD_CLOEXEC);
}

static int fetch_queue_init(FetchQueue *self, PyObject *arguments, PyObject *keywords) {
    PyObject *owner;
    int ends[2];
    if (self->owner || !rdk.version) {
        PyErr_SetString(PyExc_ValueError, self->owner ? "made already" : "open_library comes first");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "O", &owner)) return -1;
    rd_kafka_t *client = client_of(owner);
    if (!client) return -1;
    if (pipe(ends)) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    self->readable = ends[0];
    self->writable = ends[1];
    set_flags(self->readable);
    set_flags(self->writable);
    pthread_mutex_init(&self->in_use, NULL);
    self->owner = Py_NewRef(owner);
    self->client = client;
    self->fetched = rdk.queue_new(client);
    self->events = rdk.queue_get_consumer(client);
    rdk.queue_io_event_enable(self->fetched, self->writable, "", 1);
    if (self->events) rdk.queue_io_event_enable(self->events, self->writable, "", 1);
    return 0;
}

/* Must come before the client is closed, which would wait for ever for records in the queue. Waits for a call of
   `consume` on another thread. */
static PyObject *fetch_queue_close(FetchQueue *self, PyObject *ignored) {
    if (!self->owner) Py_RETURN_NONE;
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
        close(self->readable);
        close(self->writable);
    }
    pthread_mutex_unlock(&self->in_use);
    Py_RETURN_NONE;
}

static void fetch_queue_dealloc(FetchQueue *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(fetch_queue_close(self, NULL));
    if (self->owner) pthread_mutex_destroy(&self->in_use);
    Py_XDECREF(self->owner);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int is_closed(FetchQueue *self) {
    if (!self->fetched) PyErr_SetString(PyExc_ValueError, "the queue is closed");
    return !self->fetched;
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
    for (size_t at = 0; list && !rdk.header_get_all(headers, at, &name, &value, &size); at++) {
        PyObject *text = header_name(name);
        PyObject *data = text ? bytes_or_none(value, size) : NULL;
        PyObject *pair = data ? PyTuple_Pack(2, text, data) : NULL;
        if (!pair || PyList_Append(list, pair)) Py_CLEAR(list);
        Py_XDECREF(text);
        Py_XDECREF(data);
        Py_XDECREF(pair);
    }
    return list;
}

enum { OFFSETS, TIMESTAMPS, KEYS, VALUES, SIZES, HEADERS, COLUMNS };

/* The records of one partition between two errors. */
typedef struct {
    rd_kafka_topic_t *topic;
    int32_t partition;
    int is_append_time; /* whether the broker chose the time of its first record */
    Py_ssize_t count, filled;
    PyObject *columns[COLUMNS]; /* lists; that of the headers only if a record has some */
} Run;

/* Everything that one call of `consume` has taken. */
typedef struct {
    rd_kafka_event_t **events;
    const rd_kafka_message_t **messages; /* of each event; NULL for an error */
    Run *runs;
    int32_t *run_of;    /* of each message */
    int32_t *slots;     /* a hash table of the runs by partition; -1 is free */
    uint32_t slot_mask; /* the length of the table, a power of two, less one */
} Taken;

/* Sets a value and drops the caller's reference; returns whether a Python error is set. */
static int put(Run *run, int column, PyObject *value) {
    return !value || PyList_SetItem(run->columns[column], run->filled, value);
}

/* The column begins with the first record that has headers. */
static int put_headers(Run *run, PyObject *headers) {
    if (headers == Py_None && !run->columns[HEADERS]) return Py_DecRef(headers), 0;
    if (headers && !run->columns[HEADERS]) {
        run->columns[HEADERS] = PyList_New(run->count);
        for (Py_ssize_t at = 0; run->columns[HEADERS] && at < run->filled; at++)
            PyList_SetItem(run->columns[HEADERS], at, Py_NewRef(Py_None));
    }
    if (run->columns[HEADERS]) return put(run, HEADERS, headers);
    Py_XDECREF(headers);
    return 1;
}

static int put_record(Run *run, const rd_kafka_message_t *message) {
    int kind, failed = 0;
    int64_t timestamp = rdk.message_timestamp(message, &kind);
    if (!run->filled) {
        run->is_append_time = kind == APPEND_TIME;
        for (int column = 0; column < HEADERS; column++) failed |= !(run->columns[column] = PyList_New(run->count));
    }
    failed = failed || put(run, OFFSETS, PyLong_FromLongLong(message->offset)) ||
             put(run, TIMESTAMPS, PyLong_FromLongLong(timestamp)) ||
             put(run, KEYS, bytes_or_none(message->key, message->key_size)) ||
             put(run, VALUES, bytes_or_none(message->value, message->value_size)) ||
             put(run, SIZES, PyLong_FromSize_t(message->key_size + message->value_size)) ||
             put_headers(run, headers_of(message));
    run->filled++;
    return failed;
}

/* Finds the run of a message, or begins one at `runs[count]`. */
static int32_t find_run(Taken *taken, const rd_kafka_message_t *message, int32_t count) {
    uint32_t slot = ((uint32_t)((uintptr_t)message->topic >> 4) + (uint32_t)message->partition) * 2654435761u;
    for (slot &= taken->slot_mask; taken->slots[slot] >= 0; slot = (slot + 1) & taken->slot_mask) {
        Run *run = &taken->runs[taken->slots[slot]];
        if (run->topic == message->topic && run->partition == message->partition) return taken->slots[slot];
    }
    taken->runs[count] = (Run){.topic = message->topic, .partition = message->partition};
    return taken->slots[slot] = count;
}

/* Appends a value and drops the caller's reference; returns whether a Python error is set. */
static int append(PyObject *list, PyObject *value) {
    int failed = !value || PyList_Append(list, value);
    Py_XDECREF(value);
    return failed;
}

static PyObject *part_of(Run *run) {
    PyObject **c = run->columns;
    return Py_BuildValue("(isiOOOOOOO)", 0, rdk.topic_name(run->topic), run->partition,
                         run->is_append_time ? Py_True : Py_False, c[OFFSETS], c[TIMESTAMPS], c[KEYS], c[VALUES],
                         c[HEADERS] ? c[HEADERS] : Py_None, c[SIZES]);
}

/* Appends the records from `first` to before `end`, none of which is an error, by partition. */
static int append_runs(PyObject *parts, Taken *taken, ssize_t first, ssize_t end) {
    int32_t count = 0, last = -1;
    int failed = 0;
    if (first < end) memset(taken->slots, -1, (taken->slot_mask + 1) * sizeof *taken->slots);
    for (ssize_t at = first; at < end; at++) {
        const rd_kafka_message_t *message = taken->messages[at];
        Run *run = last < 0 ? NULL : &taken->runs[last];
        if (!run || run->topic != message->topic || run->partition != message->partition)
            last = find_run(taken, message, count);
        count += last == count;
        taken->runs[last].count++;
        taken->run_of[at] = last;
    }
    for (ssize_t at = first; at < end && !failed; at++)
        failed = put_record(&taken->runs[taken->run_of[at]], taken->messages[at]);
    for (int32_t at = 0; at < count; at++) {
        failed = failed || append(parts, part_of(&taken->runs[at]));
        for (int column = 0; column < COLUMNS; column++) Py_XDECREF(taken->runs[at].columns[column]);
    }
    return failed;
}

static PyObject *error_of(rd_kafka_event_t *event) {
    rd_kafka_topic_partition_t *at = rdk.event_topic_partition(event);
    const char *text = rdk.event_error_string(event);
    PyObject *found = Py_BuildValue("(isiLN)", rdk.event_error(event), at ? at->topic : "", at ? at->partition : -1,
                                    at ? (long long)at->offset : -1LL,
                                    PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"));
    if (at) rdk.topic_partition_destroy(at);
    return found;
}

static PyObject *parts_of(rd_kafka_event_t **events, ssize_t count) {
    size_t size = (size_t)count, slots = 2;
    while (slots < 2 * size) slots *= 2;
    Taken taken = {events, malloc(size * sizeof(rd_kafka_message_t *)), malloc(size * sizeof(Run)),
                   malloc(size * sizeof(int32_t)), malloc(slots * sizeof(int32_t)), (uint32_t)slots - 1};
    int has_memory = taken.messages && taken.runs && taken.run_of && taken.slots;
    PyObject *parts = !size || has_memory ? PyList_New(0) : PyErr_NoMemory();
    ssize_t first = 0;
    int failed = !parts;
    for (ssize_t at = 0; at < count && !failed; at++) {
        taken.messages[at] = rdk.event_type(events[at]) == EVENT_FETCH ? rdk.event_message_next(events[at]) : NULL;
        if (taken.messages[at]) continue;
        failed = append_runs(parts, &taken, first, at) || append(parts, error_of(events[at]));
        first = at + 1;
    }
    failed = failed || append_runs(parts, &taken, first, count);
    if (failed) Py_CLEAR(parts);
    free(taken.messages);
    free(taken.runs);
    free(taken.run_of);
    free(taken.slots);
    return parts;
}

static ssize_t take_ready(FetchQueue *self, rd_kafka_event_t **events, ssize_t most) {
    ssize_t count = 0;
    while (count < most && (events[count] = rdk.queue_poll(self->fetched, 0))) count++;
    return count;
}

/* Takes what is there, and waits only if that is nothing. */
static ssize_t take(FetchQueue *self, rd_kafka_event_t **events, ssize_t most, int milliseconds) {
    char bytes[16];
    ssize_t count = take_ready(self, events, most);
    if (count || !milliseconds) return count;
    struct pollfd wait = {.fd = self->readable, .events = POLLIN};
    poll(&wait, 1, milliseconds);
    while (read(self->readable, bytes, sizeof bytes) > 0) {}
    return take_ready(self, events, most);
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
