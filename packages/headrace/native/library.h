/* What the compiled module uses of librdkafka: the library that confluent-kafka ships, found when the module is opened.

   No header of librdkafka is at hand where Headrace is built, so its public interface is declared here. `rdk` holds the
   functions by their names without the prefix rd_kafka_. The numbers are those of rdkafka.h, which never change. */

#ifndef HEADRACE_LIBRARY_H
#define HEADRACE_LIBRARY_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct rd_kafka_s rd_kafka_t;
typedef struct rd_kafka_conf_s rd_kafka_conf_t;
typedef struct rd_kafka_event_s rd_kafka_event_t;
typedef struct rd_kafka_headers_s rd_kafka_headers_t;
typedef struct rd_kafka_queue_s rd_kafka_queue_t;
typedef struct rd_kafka_topic_s rd_kafka_topic_t;
typedef struct rd_kafka_topic_conf_s rd_kafka_topic_conf_t;
typedef struct rd_kafka_error_s rd_kafka_error_t;
typedef struct rd_kafka_topic_partition_list_s rd_kafka_topic_partition_list_t;
typedef struct rd_kafka_consumer_group_metadata_s rd_kafka_consumer_group_metadata_t;

typedef struct {
    int err;
    rd_kafka_topic_t *topic;
    int32_t partition;
    void *value;
    size_t value_size;
    void *key;
    size_t key_size;
    int64_t offset;
    void *opaque;
} rd_kafka_message_t;

typedef struct {
    char *topic;
    int32_t partition;
    int64_t offset;
    void *metadata;
    size_t metadata_size;
    void *opaque;
    int err;
    void *_private;
} rd_kafka_topic_partition_t;

enum { PRODUCER = 0, CONSUMER = 1 };                                                 /* rd_kafka_type_t */
enum { EVENT_DR = 0x1, EVENT_LOG = 0x4, EVENT_ERROR = 0x8, EVENT_STATS = 0x40 };    /* rd_kafka_event_type_t */
enum { V_END, V_TOPIC, V_RKT, V_PARTITION, V_VALUE, V_KEY, V_OPAQUE, V_MSGFLAGS, V_TIMESTAMP, V_HEADER, V_HEADERS };
enum { COPY_VALUE = 0x2 };                                                           /* RD_KAFKA_MSG_F_COPY */
enum { APPEND_TIME = 2 };                                                            /* rd_kafka_timestamp_type_t */
enum { PURGE_QUEUE = 0x1, PURGE_IN_FLIGHT = 0x2, PURGE_WITHOUT_WAIT = 0x4 };
enum { ERR_FATAL = -150, ERR_INVALID_ARGUMENT = -186 };                              /* rd_kafka_resp_err_t */

#define FUNCTIONS(X)                                                                                                    \
    X(int, version, (void))                                                                                             \
    X(const char *, err2str, (int))                                                                                     \
    X(int, type, (const rd_kafka_t *))                                                                                  \
    X(const char *, name, (const rd_kafka_t *))                                                                         \
    X(rd_kafka_conf_t *, conf_new, (void))                                                                              \
    X(void, conf_destroy, (rd_kafka_conf_t *))                                                                          \
    X(int, conf_set, (rd_kafka_conf_t *, const char *, const char *, char *, size_t))                                   \
    X(void, conf_set_events, (rd_kafka_conf_t *, int))                                                                  \
    X(void, conf_enable_sasl_queue, (rd_kafka_conf_t *, int))                                                           \
    X(rd_kafka_t *, new, (int, rd_kafka_conf_t *, char *, size_t))                                                      \
    X(void, destroy, (rd_kafka_t *))                                                                                    \
    X(int, set_log_queue, (rd_kafka_t *, rd_kafka_queue_t *))                                                           \
    X(int, fatal_error, (rd_kafka_t *, char *, size_t))                                                                 \
    X(int, outq_len, (rd_kafka_t *))                                                                                    \
    X(int, flush, (rd_kafka_t *, int))                                                                                  \
    X(int, purge, (rd_kafka_t *, int))                                                                                  \
    X(rd_kafka_error_t *, sasl_set_credentials, (rd_kafka_t *, const char *, const char *))                             \
    X(void, error_destroy, (rd_kafka_error_t *))                                                                        \
    X(int, error_code, (const rd_kafka_error_t *))                                                                      \
    X(const char *, error_string, (const rd_kafka_error_t *))                                                           \
    X(int, error_is_fatal, (const rd_kafka_error_t *))                                                                  \
    X(int, error_is_retriable, (const rd_kafka_error_t *))                                                              \
    X(int, error_txn_requires_abort, (const rd_kafka_error_t *))                                                        \
    X(rd_kafka_error_t *, init_transactions, (rd_kafka_t *, int))                                                       \
    X(rd_kafka_error_t *, begin_transaction, (rd_kafka_t *))                                                            \
    X(rd_kafka_error_t *, commit_transaction, (rd_kafka_t *, int))                                                      \
    X(rd_kafka_error_t *, abort_transaction, (rd_kafka_t *, int))                                                       \
    X(rd_kafka_error_t *, send_offsets_to_transaction, (rd_kafka_t *, const rd_kafka_topic_partition_list_t *,          \
                                                        const rd_kafka_consumer_group_metadata_t *, int))               \
    X(rd_kafka_error_t *, consumer_group_metadata_read, (rd_kafka_consumer_group_metadata_t **, const void *, size_t))  \
    X(void, consumer_group_metadata_destroy, (rd_kafka_consumer_group_metadata_t *))                                    \
    X(rd_kafka_topic_partition_list_t *, topic_partition_list_new, (int))                                               \
    X(rd_kafka_topic_partition_t *, topic_partition_list_add,                                                           \
      (rd_kafka_topic_partition_list_t *, const char *, int32_t))                                                       \
    X(void, topic_partition_list_destroy, (rd_kafka_topic_partition_list_t *))                                          \
    X(rd_kafka_topic_t *, topic_new, (rd_kafka_t *, const char *, rd_kafka_topic_conf_t *))                             \
    X(void, topic_destroy, (rd_kafka_topic_t *))                                                                        \
    X(const char *, topic_name, (const rd_kafka_topic_t *))                                                             \
    X(int, producev, (rd_kafka_t *, ...))                                                                               \
    X(int, message_status, (const rd_kafka_message_t *))                                                                \
    X(rd_kafka_headers_t *, headers_new, (size_t))                                                                      \
    X(void, headers_destroy, (rd_kafka_headers_t *))                                                                    \
    X(int, header_add, (rd_kafka_headers_t *, const char *, ssize_t, const void *, ssize_t))                            \
    X(rd_kafka_queue_t *, queue_get_main, (rd_kafka_t *))                                                               \
    X(void, queue_destroy, (rd_kafka_queue_t *))                                                                        \
    X(void, queue_io_event_enable, (rd_kafka_queue_t *, int, const void *, size_t))                                     \
    X(rd_kafka_queue_t *, queue_new, (rd_kafka_t *))                                                                    \
    X(rd_kafka_queue_t *, queue_get_consumer, (rd_kafka_t *))                                                           \
    X(rd_kafka_queue_t *, queue_get_partition, (rd_kafka_t *, const char *, int32_t))                                   \
    X(void, queue_forward, (rd_kafka_queue_t *, rd_kafka_queue_t *))                                                    \
    X(int64_t, message_timestamp, (const rd_kafka_message_t *, int *))                                                  \
    X(int, message_headers, (const rd_kafka_message_t *, rd_kafka_headers_t **))                                        \
    X(int, header_get_all, (const rd_kafka_headers_t *, size_t, const char **, const void **, size_t *))                \
    X(rd_kafka_event_t *, queue_poll, (rd_kafka_queue_t *, int))                                                        \
    X(int, event_type, (const rd_kafka_event_t *))                                                                      \
    X(const rd_kafka_message_t *, event_message_next, (rd_kafka_event_t *))                                             \
    X(rd_kafka_topic_partition_t *, event_topic_partition, (rd_kafka_event_t *))                                        \
    X(void, topic_partition_destroy, (rd_kafka_topic_partition_t *))                                                    \
    X(int, event_error, (rd_kafka_event_t *))                                                                           \
    X(const char *, event_error_string, (rd_kafka_event_t *))                                                           \
    X(int, event_log, (rd_kafka_event_t *, const char **, const char **, int *))                                        \
    X(const char *, event_stats, (rd_kafka_event_t *))                                                                  \
    X(void, event_destroy, (rd_kafka_event_t *))

#define FIELD(result, name, arguments) result(*name) arguments;
struct library {
    FUNCTIONS(FIELD)
};
#undef FIELD

extern struct library rdk;

/* What both types need, in module.c. */
extern int forks;               /* changes in a child of this process, which has none of its threads */
int may_begin(int is_made);     /* for `__init__`: else 0, with a Python error set */
void free_object(void *object); /* the end of a `dealloc` */

/* Of a broker or of librdkafka: perhaps not UTF-8. */
static inline PyObject *text_of(const char *text) {
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/* Appends a value and drops the caller's reference; returns whether a Python error is set. */
static inline int append(PyObject *list, PyObject *value) {
    int failed = !value || PyList_Append(list, value);
    Py_XDECREF(value);
    return failed;
}

/* The types of each file. */
extern PyType_Spec producer_spec;
extern PyType_Spec consumer_spec;

#endif
