/* Extension module `kvrelay_hash_table`: the type `HashTable`, which has the methods of kvrelay/hashing.py's HashIndex,
 * and `are_distinct`.
 *
 * Hashes are bytes of 16 bytes each. `column` is the caller's bytearray with 16 bytes for each row; row 0 is never used.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "table.h"

typedef struct {
    PyObject_HEAD
    struct table table;
} HashTable;

static struct table *table_of(PyObject *self) { return &((HashTable *)(void *)self)->table; }

static int has_args(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
    return 0;
}

/* Whether this is a list; if not, an exception is set. */
static int is_list(PyObject *object)
{
    if (PyList_Check(object)) return 1;
    PyErr_SetString(PyExc_TypeError, "hashes and rows come in a list");
    return 0;
}

/* The bytes of a hash; NULL (without an exception) when it is none. */
static const uint8_t *hash_in(PyObject *item)
{
    int is_hash = PyBytes_Check(item) && PyBytes_GET_SIZE(item) == HASH_BYTES;
    return is_hash ? (const uint8_t *)PyBytes_AS_STRING(item) : NULL;
}

/* Whether the column has these rows; if not, an exception is set. */
static int has_rows(const Py_buffer *column, Py_ssize_t first, Py_ssize_t last)
{
    if (first >= 1 && last < column->len / HASH_BYTES && last <= UINT32_MAX) return 1;
    PyErr_Format(PyExc_ValueError, "the column has no row %zd", first < 1 ? first : last);
    return 0;
}

static int find_batch(const struct table *table, const Py_buffer *column, const Py_buffer *kinds, PyObject *hashes, Py_ssize_t first,
                      Py_ssize_t count, PyObject *rows, PyObject *found)
{
    const uint8_t *wanted[BATCH];
    uint64_t keys[BATCH];
    for (Py_ssize_t i = 0; i < count; i++) {
        wanted[i] = hash_in(PyList_GET_ITEM(hashes, first + i));
        if (wanted[i] == NULL) continue;
        keys[i] = key_of(table, wanted[i]);
        prefetch(table, keys[i]);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t row = wanted[i] == NULL ? 0 : kr_table_find(table, keys[i], wanted[i], column->buf);
        if ((Py_ssize_t)row >= kinds->len / (Py_ssize_t)sizeof(int32_t)) row = 0;
        PyObject *number = PyLong_FromUnsignedLong(row), *kind = PyLong_FromLong(((const int32_t *)kinds->buf)[row]);
        if (number == NULL || kind == NULL) {
            Py_XDECREF(number);
            Py_XDECREF(kind);
            return -1;
        }
        PyList_SET_ITEM(rows, first + i, number);
        PyList_SET_ITEM(found, first + i, kind);
    }
    return 0;
}

static PyObject *find_all(const struct table *table, const Py_buffer *column, const Py_buffer *kinds, PyObject *hashes)
{
    Py_ssize_t count = PyList_GET_SIZE(hashes);
    PyObject *rows = PyList_New(count), *found = PyList_New(count), *both = NULL;
    int failed = rows == NULL || found == NULL || kinds->len < (Py_ssize_t)sizeof(int32_t);
    for (Py_ssize_t i = 0; !failed && i < count; i += BATCH)
        failed = find_batch(table, column, kinds, hashes, i, count - i < BATCH ? count - i : BATCH, rows, found);
    if (!failed) both = PyTuple_Pack(2, rows, found);
    Py_XDECREF(rows);
    Py_XDECREF(found);
    if (both == NULL && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no row 0");
    return both;
}

static PyObject *find(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer column, kinds;
    if (!has_args(num_args, 3) || !is_list(args[2]) || PyObject_GetBuffer(args[0], &column, PyBUF_SIMPLE) != 0) return NULL;
    PyObject *both = NULL;
    if (PyObject_GetBuffer(args[1], &kinds, PyBUF_SIMPLE) == 0) {
        both = find_all(table_of(self), &column, &kinds, args[2]);
        PyBuffer_Release(&kinds);
    }
    PyBuffer_Release(&column);
    return both;
}

static PyObject *find_one(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer column;
    if (!has_args(num_args, 2)) return NULL;
    const uint8_t *hash = hash_in(args[1]);
    if (hash == NULL) return PyLong_FromLong(0);
    if (PyObject_GetBuffer(args[0], &column, PyBUF_SIMPLE) != 0) return NULL;
    const struct table *table = table_of(self);
    uint32_t row = kr_table_find(table, key_of(table, hash), hash, column.buf);
    PyBuffer_Release(&column);
    return PyLong_FromUnsignedLong(row);
}

/* Writes up to BATCH hashes to the column and adds their rows. 0, or -1 with an exception set. */
static int add_batch(struct table *table, const Py_buffer *column, PyObject *hashes, Py_ssize_t begin, Py_ssize_t count, Py_ssize_t first)
{
    uint64_t keys[BATCH];
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *hash = hash_in(PyList_GET_ITEM(hashes, begin + i));
        if (hash == NULL) {
            PyErr_SetString(PyExc_ValueError, "a hash has 16 bytes");
            return -1;
        }
        memcpy((uint8_t *)column->buf + (first + i) * HASH_BYTES, hash, HASH_BYTES);
        keys[i] = key_of(table, hash);
        prefetch(table, keys[i]);
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (kr_table_add(table, keys[i], (uint32_t)(first + i)) != 0) {
            PyErr_NoMemory();
            return -1;
        }
    return 0;
}

static PyObject *add(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer column;
    if (!has_args(num_args, 3) || !is_list(args[1])) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(args[1]), first = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &column, PyBUF_WRITABLE) != 0) return NULL;
    int failed = count > 0 && !has_rows(&column, first, first + count - 1);
    for (Py_ssize_t i = 0; !failed && i < count; i += BATCH)
        failed = add_batch(table_of(self), &column, args[1], i, count - i < BATCH ? count - i : BATCH, first + i);
    PyBuffer_Release(&column);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* Up to BATCH row numbers of a list, and the keys of their hashes. 0, or -1 with an exception set. */
static int read_rows(const struct table *table, const Py_buffer *column, PyObject *list, Py_ssize_t begin, Py_ssize_t count, uint32_t *rows,
                     uint64_t *keys)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GET_ITEM(list, begin + i);
        if (!PyLong_CheckExact(item)) { /* others run Python code, which may change the list */
            PyErr_SetString(PyExc_TypeError, "a row is an int");
            return -1;
        }
        Py_ssize_t row = PyLong_AsSsize_t(item);
        if (PyErr_Occurred() || !has_rows(column, row, row)) return -1;
        rows[i] = (uint32_t)row;
        keys[i] = key_of(table, (const uint8_t *)column->buf + row * HASH_BYTES);
        prefetch(table, keys[i]);
    }
    return 0;
}

static int remove_all(struct table *table, const Py_buffer *column, PyObject *list)
{
    uint32_t rows[BATCH];
    uint64_t keys[BATCH];
    for (Py_ssize_t begin = 0, size = PyList_GET_SIZE(list); begin < size; begin += BATCH) {
        Py_ssize_t count = size - begin < BATCH ? size - begin : BATCH;
        if (read_rows(table, column, list, begin, count, rows, keys) != 0) return -1;
        for (Py_ssize_t i = 0; i < count; i++) kr_table_remove(table, keys[i], rows[i]);
    }
    return 0;
}

static PyObject *remove_rows(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer column;
    if (!has_args(num_args, 2) || !is_list(args[1]) || PyObject_GetBuffer(args[0], &column, PyBUF_SIMPLE) != 0) return NULL;
    int failed = remove_all(table_of(self), &column, args[1]);
    PyBuffer_Release(&column);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static int move_all(struct table *table, const Py_buffer *column, PyObject *list, Py_ssize_t target)
{
    uint32_t rows[BATCH];
    uint64_t keys[BATCH];
    uint8_t *bytes = column->buf;
    for (Py_ssize_t begin = 0, size = PyList_GET_SIZE(list); begin < size; begin += BATCH) {
        Py_ssize_t count = size - begin < BATCH ? size - begin : BATCH;
        if (!has_rows(column, target, target + count - 1)) return -1;
        if (read_rows(table, column, list, begin, count, rows, keys) != 0) return -1;
        for (Py_ssize_t i = 0; i < count; i++, target++) {
            kr_table_move(table, keys[i], rows[i], (uint32_t)target);
            memmove(bytes + target * HASH_BYTES, bytes + (size_t)rows[i] * HASH_BYTES, HASH_BYTES);
        }
    }
    return 0;
}

static PyObject *move(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer column;
    if (!has_args(num_args, 3) || !is_list(args[1])) return NULL;
    Py_ssize_t first = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &column, PyBUF_WRITABLE) != 0) return NULL;
    int failed = move_all(table_of(self), &column, args[1], first);
    PyBuffer_Release(&column);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *count(PyObject *self, PyObject *unused) { return PyLong_FromSize_t(table_of(self)->count); }

static PyObject *num_bytes(PyObject *self, PyObject *unused) { return PyLong_FromSize_t(kr_table_bytes(table_of(self))); }

static PyMethodDef METHODS[] = {
    {"find", (PyCFunction)(void (*)(void))find, METH_FASTCALL, "find(column, kinds, hashes) -> (rows, kinds)"},
    {"find_one", (PyCFunction)(void (*)(void))find_one, METH_FASTCALL, "find_one(column, hash) -> row"},
    {"add", (PyCFunction)(void (*)(void))add, METH_FASTCALL, "add(column, hashes, first)"},
    {"move", (PyCFunction)(void (*)(void))move, METH_FASTCALL, "move(column, rows, first)"},
    {"remove", (PyCFunction)(void (*)(void))remove_rows, METH_FASTCALL, "remove(column, rows)"},
    {"count", count, METH_NOARGS, "count() -> rows in use"},
    {"num_bytes", num_bytes, METH_NOARGS, "num_bytes() -> bytes of memory"},
    {NULL, NULL, 0, NULL},
};

static PyObject *new_table(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "K", &seed)) return NULL;
    PyObject *self = type->tp_alloc(type, 0); /* zeroed */
    if (self != NULL) table_of(self)->seed = seed;
    return self;
}

static void dealloc(PyObject *self)
{
    kr_table_clear(table_of(self));
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject TYPE = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvrelay_hash_table.HashTable",
    .tp_basicsize = sizeof(HashTable),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "HashTable(seed)",
    .tp_methods = METHODS,
    .tp_new = new_table,
    .tp_dealloc = dealloc,
};

#define MOST_COMPARED 1024 /* hashes; twice as many buckets lie on the stack */

/* Whether a short list's hashes are known to be distinct at little cost. Hashes that collide too often count as unknown. */
static int distinct(PyObject *list, Py_ssize_t size)
{
    uint16_t buckets[2 * MOST_COMPARED] = {0}; /* a hash's number in the list, from 1 on */
    const uint8_t *hashes[MOST_COMPARED];
    Py_ssize_t patience = 4 * size + 64;
    for (Py_ssize_t i = 0; i < size; i++) {
        uint64_t a, b;
        if ((hashes[i] = hash_in(PyList_GET_ITEM(list, i))) == NULL) return 0;
        memcpy(&a, hashes[i], 8);
        memcpy(&b, hashes[i] + 8, 8);
        size_t bucket = (a ^ (b << 32 | b >> 32)) * 0x9e3779b97f4a7c15u >> 53;
        for (; buckets[bucket] != 0; bucket = (bucket + 1) % (2 * MOST_COMPARED))
            if (patience-- == 0 || memcmp(hashes[buckets[bucket] - 1], hashes[i], HASH_BYTES) == 0) return 0;
        buckets[bucket] = (uint16_t)(i + 1);
    }
    return 1;
}

static PyObject *are_distinct(PyObject *module, PyObject *list)
{
    if (!is_list(list)) return NULL;
    Py_ssize_t size = PyList_GET_SIZE(list);
    return PyBool_FromLong(size <= MOST_COMPARED && distinct(list, size));
}

static PyMethodDef FUNCTIONS[] = {
    {"are_distinct", are_distinct, METH_O, "are_distinct(hashes) -> whether they are known to be distinct"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "kvrelay_hash_table", .m_size = -1, .m_methods = FUNCTIONS};

PyMODINIT_FUNC PyInit_kvrelay_hash_table(void)
{
    PyObject *module = PyType_Ready(&TYPE) == 0 ? PyModule_Create(&MODULE) : NULL;
    if (module != NULL && PyModule_AddObjectRef(module, "HashTable", (PyObject *)&TYPE) != 0) Py_CLEAR(module);
    return module;
}
