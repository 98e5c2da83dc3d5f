/* Extension module `kvrelay_block_hash`: the packing and chaining of kvrelay/hashing.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "blake2b.h"

#define RELEASE_BYTES (1 << 18) /* from this size on the interpreter lock is released; for less, taking it again costs more */
#define AHEAD 24                /* ints lie all over the heap: prefetched so many items ahead */

/* Writes one int, which runs no Python code. 0, or -1 with an exception set: it is no int, or not one of 32 bits. */
static inline int pack_int(PyObject *item, int32_t *out)
{
    int overflow;
    long value = PyLong_AsLongAndOverflow(item, &overflow);
    *out = (int32_t)value;
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value == *out && !overflow) return 0;
    PyErr_SetString(PyExc_OverflowError, "a token is an int32");
    return -1;
}

/* Writes another kind of item, whose __index__ may drop the list's reference to it. */
static __attribute__((noinline)) int pack_other(PyObject *item, int32_t *out)
{
    Py_INCREF(item);
    int failed = pack_int(item, out);
    Py_DECREF(item);
    return failed;
}

/* Fills `out` with list[start : start + count]. 0, or -1 with an exception set. */
static int pack_items(PyObject *list, Py_ssize_t start, Py_ssize_t count, int32_t *out)
{
    for (Py_ssize_t i = start; i < start + count; i++, out++) {
        Py_ssize_t size = PyList_GET_SIZE(list); /* read again each time: an item's __index__ may shorten the list */
        if (i >= size) {
            PyErr_SetString(PyExc_IndexError, "list index out of range");
            return -1;
        }
        if (i + AHEAD < size) __builtin_prefetch(PyList_GET_ITEM(list, i + AHEAD));
        PyObject *item = PyList_GET_ITEM(list, i);
        if (PyLong_CheckExact(item) ? pack_int(item, out) : pack_other(item, out)) return -1;
    }
    return 0;
}

/* pack(list, start, end): ints as little-endian int32. Raises OverflowError, TypeError, IndexError, ValueError (start < 0). */
static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 3 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "pack(list, start, end)");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (start < 0) return PyErr_Format(PyExc_ValueError, "start is at least 0, not %zd", start);
    Py_ssize_t count = end > start ? end - start : 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizeof(int32_t) * count);
    if (bytes != NULL && pack_items(args[0], start, count, (int32_t *)(void *)PyBytes_AS_STRING(bytes)) != 0) Py_CLEAR(bytes);
    return bytes;
}

static PyObject *chained(const Py_buffer *parent, const Py_buffer *packed, Py_ssize_t width)
{
    if (parent->len != DIGEST_BYTES || width <= 0) {
        PyErr_SetString(PyExc_ValueError, "a parent has 16 bytes, a block at least one");
        return NULL;
    }
    Py_ssize_t count = packed->len / width;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, DIGEST_BYTES * count);
    if (bytes == NULL) return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AS_STRING(bytes);
    PyThreadState *state = packed->len < RELEASE_BYTES ? NULL : PyEval_SaveThread();
    kr_chain(parent->buf, packed->buf, (size_t)width, (size_t)count, out);
    if (state != NULL) PyEval_RestoreThread(state);
    return bytes;
}

/* chain(parent, packed, width): 16 bytes for every `width` bytes of packed tokens. Raises ValueError. */
static PyObject *chain(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer parent, packed;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "chain(parent, packed, width)");
        return NULL;
    }
    Py_ssize_t width = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &parent, PyBUF_SIMPLE) != 0) return NULL;
    PyObject *bytes = NULL;
    if (PyObject_GetBuffer(args[1], &packed, PyBUF_SIMPLE) == 0) {
        bytes = chained(&parent, &packed, width);
        PyBuffer_Release(&packed);
    }
    PyBuffer_Release(&parent);
    return bytes;
}

static PyMethodDef FUNCTIONS[] = {
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, "pack(list, start, end) -> bytes"},
    {"chain", (PyCFunction)(void (*)(void))chain, METH_FASTCALL, "chain(parent, packed, width) -> bytes"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "kvrelay_block_hash", .m_size = -1, .m_methods = FUNCTIONS};

PyMODINIT_FUNC PyInit_kvrelay_block_hash(void) { return PyModule_Create(&MODULE); }
