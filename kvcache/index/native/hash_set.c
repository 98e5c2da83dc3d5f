/* Extension module `kvrelay_hash_set`: the type `HashSet`, which has the methods of kvcache/index/hash_set.py's PythonHashSet.
 *
 * Hashes have 16 bytes. They lie in rows in the order in which they came; a row whose hash has left stays empty until the rows are
 * packed, when there is no room for another one.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NUM_SHARDS 1 /* the sets of a pool are small beside the router's index, and most are emptied at every drain */
#include "table.c"

#define FIRST_ROW 1
#define FEWEST_ROWS 64

typedef struct {
    PyObject_HEAD
    struct table table;
    uint8_t *column, *is_used; /* of each row */
    size_t end, capacity;      /* rows: the next one, and how many there is room for */
} HashSet;

static HashSet *set_of(PyObject *self) { return (HashSet *)(void *)self; }

/* Moves the hashes to the first rows. */
static void pack_rows(HashSet *set)
{
    size_t target = FIRST_ROW;
    for (size_t row = FIRST_ROW; row < set->end; row++) {
        if (!set->is_used[row]) continue;
        uint8_t *hash = set->column + row * HASH_BYTES;
        kr_table_move(&set->table, key_of(&set->table, hash), (uint32_t)row, (uint32_t)target);
        memmove(set->column + target * HASH_BYTES, hash, HASH_BYTES);
        set->is_used[row] = 0;
        set->is_used[target++] = 1;
    }
    set->end = target;
}

/* Makes room for `count` more rows. 0, or -1 with an exception set, and nothing has changed. */
static int reserve(HashSet *set, size_t count)
{
    if (set->end + count <= set->capacity) return 0;
    if (FIRST_ROW + 2 * (set->table.count + count) <= set->capacity) {
        pack_rows(set);
        return 0;
    }
    size_t capacity = FEWEST_ROWS + 2 * (set->table.count + count);
    if (capacity < set->end + count) pack_rows(set);
    uint8_t *column = capacity > UINT32_MAX ? NULL : realloc(set->column, capacity * HASH_BYTES);
    if (column != NULL) set->column = column;
    uint8_t *is_used = column == NULL ? NULL : realloc(set->is_used, capacity);
    if (is_used == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    set->is_used = is_used;
    set->capacity = capacity;
    return 0;
}

static uint32_t row_with(const HashSet *set, uint64_t key, const uint8_t *hash)
{
    return set->column == NULL ? 0 : kr_table_find(&set->table, key, hash, set->column);
}

/* Appends a hash that is not in the set; there is room. 0, or -1 with an exception set. */
static int append(HashSet *set, uint64_t key, const uint8_t *hash)
{
    if (kr_table_add(&set->table, key, (uint32_t)set->end) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(set->column + set->end * HASH_BYTES, hash, HASH_BYTES);
    set->is_used[set->end++] = 1;
    return 0;
}

/* Removes a hash; whether it was in the set. */
static int discard(HashSet *set, uint64_t key, const uint8_t *hash)
{
    uint32_t row = row_with(set, key, hash);
    if (row == 0) return 0;
    kr_table_remove(&set->table, key, row);
    set->is_used[row] = 0;
    return 1;
}

/* The keys of up to BATCH hashes, whose entries are being fetched. */
static void begin_batch(const struct table *table, const uint8_t *const *hashes, Py_ssize_t count, uint64_t *keys)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        keys[i] = key_of(table, hashes[i]);
        prefetch(table, keys[i]);
    }
}

static Py_ssize_t batch_size(Py_ssize_t left) { return left < BATCH ? left : BATCH; }

static int toggle_all(HashSet *set, HashSet *opposite, const uint8_t *run, Py_ssize_t size)
{
    const uint8_t *hashes[BATCH];
    uint64_t keys[BATCH], others[BATCH];
    for (Py_ssize_t first = 0; first < size; first += BATCH) {
        Py_ssize_t count = batch_size(size - first);
        for (Py_ssize_t i = 0; i < count; i++) hashes[i] = run + (first + i) * HASH_BYTES;
        begin_batch(&set->table, hashes, count, keys);
        begin_batch(&opposite->table, hashes, count, others);
        for (Py_ssize_t i = 0; i < count; i++) {
            if (discard(opposite, others[i], hashes[i])) continue;
            if (row_with(set, keys[i], hashes[i]) == 0 && append(set, keys[i], hashes[i]) != 0) return -1;
        }
    }
    return 0;
}

static PyTypeObject TYPE;

/* toggle(run, opposite) */
static PyObject *toggle(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2 || !Py_IS_TYPE(args[1], &TYPE) || args[1] == self) {
        PyErr_SetString(PyExc_TypeError, "toggle(run, opposite), which is another set");
        return NULL;
    }
    Py_buffer run;
    if (PyObject_GetBuffer(args[0], &run, PyBUF_SIMPLE) != 0) return NULL;
    Py_ssize_t size = run.len / HASH_BYTES;
    int failed = reserve(set_of(self), (size_t)size) != 0 || toggle_all(set_of(self), set_of(args[1]), run.buf, size) != 0;
    PyBuffer_Release(&run);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* The bytes of a hash; NULL (without an exception) when it is none. */
static const uint8_t *hash_in(PyObject *item)
{
    int is_hash = PyBytes_Check(item) && PyBytes_GET_SIZE(item) == HASH_BYTES;
    return is_hash ? (const uint8_t *)PyBytes_AS_STRING(item) : NULL;
}

/* Adds or discards up to BATCH hashes of a tuple, and appends those that this changed to the list. */
static int change_batch(HashSet *set, PyObject *hashes, Py_ssize_t first, Py_ssize_t count, int is_added, PyObject *changed)
{
    const uint8_t *wanted[BATCH];
    uint64_t keys[BATCH];
    for (Py_ssize_t i = 0; i < count; i++)
        if ((wanted[i] = hash_in(PyTuple_GET_ITEM(hashes, first + i))) == NULL) {
            PyErr_SetString(PyExc_ValueError, "a hash has 16 bytes");
            return -1;
        }
    begin_batch(&set->table, wanted, count, keys);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (is_added ? row_with(set, keys[i], wanted[i]) != 0 : !discard(set, keys[i], wanted[i])) continue;
        if (is_added && append(set, keys[i], wanted[i]) != 0) return -1;
        if (PyList_Append(changed, PyTuple_GET_ITEM(hashes, first + i)) != 0) return -1;
    }
    return 0;
}

static PyObject *change(PyObject *self, PyObject *hashes, int is_added)
{
    if (!PyTuple_Check(hashes)) return PyErr_Format(PyExc_TypeError, "hashes come in a tuple");
    Py_ssize_t size = PyTuple_GET_SIZE(hashes);
    if (is_added && reserve(set_of(self), (size_t)size) != 0) return NULL;
    PyObject *changed = PyList_New(0);
    for (Py_ssize_t first = 0; changed != NULL && first < size; first += BATCH)
        if (change_batch(set_of(self), hashes, first, batch_size(size - first), is_added, changed) != 0) Py_CLEAR(changed);
    return changed;
}

static PyObject *add(PyObject *self, PyObject *hashes) { return change(self, hashes, 1); }
static PyObject *remove_all(PyObject *self, PyObject *hashes) { return change(self, hashes, 0); }

/* hashes() */
static PyObject *all_hashes(PyObject *self, PyObject *unused)
{
    HashSet *set = set_of(self);
    PyObject *tuple = PyTuple_New((Py_ssize_t)set->table.count);
    Py_ssize_t at = 0;
    for (size_t row = FIRST_ROW; tuple != NULL && row < set->end; row++) {
        if (!set->is_used[row]) continue;
        PyObject *hash = PyBytes_FromStringAndSize((const char *)set->column + row * HASH_BYTES, HASH_BYTES);
        if (hash == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, at++, hash);
    }
    return tuple;
}

/* clear(): what is large (over about 1 MB) is freed, so that one burst does not keep its memory; a long prompt fits. */
static PyObject *clear(PyObject *self, PyObject *unused)
{
    HashSet *set = set_of(self);
    if (set->capacity > 512 * FEWEST_ROWS) {
        kr_table_clear(&set->table);
        memset(set->table.shards, 0, sizeof set->table.shards);
        free(set->column);
        free(set->is_used);
        set->column = set->is_used = NULL;
        set->capacity = 0;
    } else if (set->table.count != 0) {
        struct shard *shard = &set->table.shards[0];
        memset(shard->entries, 0, shard->size * sizeof(entry));
        shard->used = 0;
    }
    set->table.count = 0;
    set->end = FIRST_ROW;
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"toggle", (PyCFunction)(void (*)(void))toggle, METH_FASTCALL, "toggle(run, opposite)"},
    {"add", add, METH_O, "add(hashes) -> those that are new"},
    {"remove", remove_all, METH_O, "remove(hashes) -> those that were there"},
    {"hashes", all_hashes, METH_NOARGS, "hashes() -> all, in the order in which they came"},
    {"clear", clear, METH_NOARGS, "clear()"},
    {NULL, NULL, 0, NULL},
};

static Py_ssize_t length(PyObject *self) { return (Py_ssize_t)set_of(self)->table.count; }

static int contains(PyObject *self, PyObject *item)
{
    const uint8_t *hash = hash_in(item);
    return hash != NULL && row_with(set_of(self), key_of(&set_of(self)->table, hash), hash) != 0;
}

static PySequenceMethods SEQUENCE = {.sq_length = length, .sq_contains = contains};

static PyObject *new_set(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "K", &seed)) return NULL;
    PyObject *self = type->tp_alloc(type, 0); /* zeroed */
    if (self == NULL) return NULL;
    set_of(self)->table.seed = seed;
    set_of(self)->end = FIRST_ROW;
    return self;
}

static void dealloc(PyObject *self)
{
    kr_table_clear(&set_of(self)->table);
    free(set_of(self)->column);
    free(set_of(self)->is_used);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject TYPE = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvrelay_hash_set.HashSet",
    .tp_basicsize = sizeof(HashSet),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "HashSet(seed)",
    .tp_methods = METHODS,
    .tp_as_sequence = &SEQUENCE,
    .tp_new = new_set,
    .tp_dealloc = dealloc,
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "kvrelay_hash_set", .m_size = -1};

PyMODINIT_FUNC PyInit_kvrelay_hash_set(void)
{
    PyObject *module = PyType_Ready(&TYPE) == 0 ? PyModule_Create(&MODULE) : NULL;
    if (module != NULL && PyModule_AddObjectRef(module, "HashSet", (PyObject *)&TYPE) != 0) Py_CLEAR(module);
    return module;
}
