/* Tokens as Python has them, and their hashes: builtins `pack` and `chain` (see hashing_native.py). */

#include "python.h"

#define DIGEST 16
#define RELEASE_BYTES (1 << 18) /* from here on other threads may run meanwhile; below, getting the lock back costs more */
#define AHEAD 24                /* numbers lie all over the heap: fetched into the cache so many before they are read */

void kr_chain(const uint8_t *parent, const uint8_t *tokens, size_t width, size_t num_blocks, uint8_t *out);

extern PyObject PyLong_Type;

/* Lists and ints as CPython 3.11 and 3.12 lay them out, which is no part of the stable ABI: used where the caller says so. */
struct list {
    ptrdiff_t refs;
    void *type;
    ptrdiff_t size;
    PyObject **items;
    ptrdiff_t allocated;
};
struct integer {
    ptrdiff_t refs;
    void *type;
    intptr_t size;     /* 3.11: number of digits, negative for negative numbers; 3.12: that times 8, + 0, 1, 2 for +, 0, - */
    uint32_t digits[]; /* of 30 bits */
};

static enum layout { UNKNOWN = 0, PYTHON_3_11 = 11, PYTHON_3_12 = 12 } layout; /* of this interpreter; see `use_layout` */

/* Whether this is an int of one digit; its value. */
static inline int is_short(const struct integer *number, int32_t *value)
{
    if (number->type != (void *)&PyLong_Type) return 0;
    if (layout == PYTHON_3_11) {
        if (number->size < -1 || number->size > 1) return 0;
        *value = (int32_t)number->size * (int32_t)number->digits[0];
    } else {
        if (number->size >= 2 << 3) return 0;
        *value = (1 - (int32_t)(number->size & 3)) * (int32_t)number->digits[0];
    }
    return 1;
}

/* 0, or -1 with an exception set. */
static int pack_one(PyObject *list, ptrdiff_t index, int32_t *out)
{
    PyObject *item = PyList_GetItem(list, index);
    long value = item == NULL ? -1 : PyLong_AsLong(item);
    if (value == -1 && PyErr_Occurred() != NULL) return -1;
    if (value != (int32_t)value) {
        PyErr_SetString(PyExc_OverflowError, "a token is no int32");
        return -1;
    }
    *out = (int32_t)value;
    return 0;
}

static int pack_known(PyObject *object, ptrdiff_t start, ptrdiff_t count, int32_t *out)
{
    const volatile struct list *list = (const struct list *)object;
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t at = start + i;
        if (at + AHEAD < list->size) __builtin_prefetch(list->items[at + AHEAD]);
        if (at < list->size && is_short((const struct integer *)list->items[at], out + i)) continue;
        if (pack_one(object, at, out + i) != 0) return -1; /* a number's own code may have changed the list */
    }
    return 0;
}

/* pack(list, start, end): ints as int32 in bytes. Raises OverflowError, TypeError, IndexError. */
static PyObject *pack(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    if (!has_args(num_args, 3)) return NULL;
    ptrdiff_t start = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() != NULL || PyList_Size(args[0]) < 0) return NULL;
    if (start < 0) return PyErr_Format(PyExc_ValueError, "a list has no item %zd", start);
    ptrdiff_t count = end > start ? end - start : 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, 4 * count);
    if (bytes == NULL) return NULL;
    int32_t *out = (int32_t *)PyBytes_AsString(bytes);
    int failed = 0;
    if (layout != UNKNOWN)
        failed = pack_known(args[0], start, count, out);
    else
        for (ptrdiff_t i = 0; i < count && !failed; i++) failed = pack_one(args[0], start + i, out + i);
    if (!failed) return bytes;
    Py_DecRef(bytes);
    return NULL;
}

static PyObject *chained(const Py_buffer *parent, const Py_buffer *packed, ptrdiff_t width)
{
    if (parent->len != DIGEST || width <= 0) {
        PyErr_SetString(PyExc_ValueError, "a parent has 16 bytes, a block at least one");
        return NULL;
    }
    ptrdiff_t count = packed->len / width;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, DIGEST * count);
    if (bytes == NULL) return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AsString(bytes);
    void *state = packed->len < RELEASE_BYTES ? NULL : PyEval_SaveThread();
    kr_chain(parent->buf, packed->buf, width, count, out);
    if (state != NULL) PyEval_RestoreThread(state);
    return bytes;
}

/* chain(parent, packed, width): 16 bytes for every `width` bytes of packed tokens. */
static PyObject *chain(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    Py_buffer parent, packed;
    if (!has_args(num_args, 3)) return NULL;
    ptrdiff_t width = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() != NULL || PyObject_GetBuffer(args[0], &parent, PyBUF_SIMPLE) != 0) return NULL;
    PyObject *bytes = NULL;
    if (PyObject_GetBuffer(args[1], &packed, PyBUF_SIMPLE) == 0) {
        bytes = chained(&parent, &packed, width);
        PyBuffer_Release(&packed);
    }
    PyBuffer_Release(&parent);
    return bytes;
}

/* use_layout(minor): that of this minor version of CPython 3; 0: of none that is known. */
static PyObject *use_layout(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    if (!has_args(num_args, 1)) return NULL;
    long minor = PyLong_AsLong(args[0]);
    layout = minor == PYTHON_3_11 || minor == PYTHON_3_12 ? (enum layout)minor : UNKNOWN;
    return PyErr_Occurred() == NULL ? none() : NULL;
}

static PyMethodDef FUNCTIONS[] = {
    {"pack", pack, METH_FASTCALL, NULL},
    {"chain", chain, METH_FASTCALL, NULL},
    {"use_layout", use_layout, METH_FASTCALL, NULL},
};

PyObject *kr_builtins(void) { return builtins(FUNCTIONS, 3, NULL); }
