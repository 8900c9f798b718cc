/* The module headrace.kafka._columns: Kafka's records without an object and a callback for each.

   `open_library` must be called before anything else; it finds librdkafka in the process. All calls hold the
   interpreter's lock, except where a file says that it is released, so one call never meets another. */

#include "library.h"

#include <dlfcn.h>
#include <pthread.h>

struct library rdk;
int forks;

static void forked(void) { forks++; }

int may_begin(int is_made) {
    const char *problem = is_made ? "made already" : rdk.version ? NULL : "open_library comes first";
    if (problem) PyErr_SetString(PyExc_ValueError, problem);
    return !problem;
}

void free_object(void *object) {
    PyTypeObject *type = Py_TYPE((PyObject *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *open_library(PyObject *module, PyObject *path) {
    const char *file = PyUnicode_AsUTF8AndSize(path, NULL);
    if (!file) return NULL;
    /* NOLOAD: the library that confluent-kafka uses, never a second copy of it. */
    void *library = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return PyErr_Format(PyExc_OSError, "%s is not loaded", file);
    struct library found;
#define FIND(result, function, arguments)                                     \
    if (!(*(void **)&found.function = dlsym(library, "rd_kafka_" #function))) \
        return PyErr_Format(PyExc_OSError, "%s has no rd_kafka_" #function, file);
    FUNCTIONS(FIND)
#undef FIND
    rdk = found;
    return PyLong_FromLong(rdk.version());
}

static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    int failed = !type || PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed;
}

static PyMethodDef functions[] = {
    {"open_library", open_library, METH_O,
     "Find librdkafka, which is loaded already, by the path of its file; return its version as 0xMMmmrrpp."},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_columns", "Kafka's records without an object and a callback for each.", -1, functions,
};

PyMODINIT_FUNC PyInit__columns(void) {
    pthread_atfork(NULL, NULL, forked);
    PyObject *module = PyModule_Create(&definition);
    if (module && (add_type(module, &producer_spec) || add_type(module, &consumer_spec))) Py_CLEAR(module);
    return module;
}
