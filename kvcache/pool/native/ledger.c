/* Extension module `kvrelay_ledger`: the type `BlockCounters`, which has the operations of kvcache/pool/ledger.py on many blocks.
 *
 * Block ids come as any buffer of int32. Nodes that are returned appear once for every run of their blocks.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HASH_BYTES 16

/* Three arrays, one number each for every block; their memory is held for as long as this lives. */
typedef struct {
    PyObject_HEAD
    Py_buffer refs, generations, owners;
} BlockCounters;

/* A call's block ids, and the arrays that they index. */
struct call {
    Py_buffer view;
    const int32_t *blocks;
    Py_ssize_t count;
    int32_t *refs, *owners;
    uint32_t *generations, num_blocks;
};

static int has_args(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
    return 0;
}

/* Opens the buffer of block ids. 0, or -1 with an exception set. */
static int open_call(PyObject *self, PyObject *blocks, struct call *call)
{
    BlockCounters *counters = (BlockCounters *)(void *)self;
    if (PyObject_GetBuffer(blocks, &call->view, PyBUF_SIMPLE) != 0) return -1;
    call->blocks = call->view.buf, call->count = call->view.len / (Py_ssize_t)sizeof(int32_t);
    call->refs = counters->refs.buf, call->generations = counters->generations.buf, call->owners = counters->owners.buf;
    call->num_blocks = (uint32_t)(counters->refs.len / (Py_ssize_t)sizeof(int32_t));
    return 0;
}

/* Whether this block exists; if not, an exception is set. */
static inline int is_known(const struct call *call, int32_t block)
{
    if ((uint32_t)block < call->num_blocks) return 1;
    PyErr_Format(PyExc_ValueError, "there is no block %d", block);
    return 0;
}

/* As open_call; all ids are in range. */
static int begin(PyObject *self, PyObject *blocks, struct call *call)
{
    if (open_call(self, blocks, call) != 0) return -1;
    uint32_t num_unknown = 0; /* without a branch, so that it takes a twentieth of the time */
    for (Py_ssize_t i = 0; i < call->count; i++) num_unknown += (uint32_t)call->blocks[i] >= call->num_blocks;
    if (num_unknown == 0) return 0;
    for (Py_ssize_t i = 0; is_known(call, call->blocks[i]);) i++;
    PyBuffer_Release(&call->view);
    return -1;
}

/* 0, or -1 with an exception set. */
static int append(PyObject *list, long value)
{
    PyObject *number = PyLong_FromLong(value);
    int failed = number == NULL || PyList_Append(list, number) != 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* A tuple that takes these references; NULL with an exception set where one is NULL. */
static PyObject *tuple_of(Py_ssize_t size, PyObject *const *items)
{
    PyObject *tuple = PyTuple_New(size);
    int failed = tuple == NULL;
    for (Py_ssize_t i = 0; i < size; i++) {
        failed |= items[i] == NULL;
        if (tuple != NULL)
            PyTuple_SET_ITEM(tuple, i, items[i]);
        else
            Py_XDECREF(items[i]);
    }
    if (failed) Py_CLEAR(tuple);
    return tuple;
}

static PyObject *take(PyObject *self, PyObject *blocks)
{
    struct call call;
    if (begin(self, blocks, &call) != 0) return NULL;
    for (Py_ssize_t i = 0; i < call.count; i++) {
        call.refs[call.blocks[i]] = 1;
        call.generations[call.blocks[i]]++;
    }
    PyBuffer_Release(&call.view);
    Py_RETURN_NONE;
}

/* Adds a reference to each block and the nodes of idle ones to the list. How many were idle; -1, and no change: an exception is set. */
static Py_ssize_t acquire_all(const struct call *call, PyObject *nodes)
{
    Py_ssize_t num_idle = 0, num_done = 0;
    int32_t last = -1;
    for (; num_done < call->count; num_done++) {
        int32_t block = call->blocks[num_done];
        if (call->refs[block] == 0) {
            if (call->owners[block] < 0) {
                PyErr_Format(PyExc_AssertionError, "block %d is free and cannot be acquired", block);
                break;
            }
            num_idle++;
            if (call->owners[block] != last && append(nodes, last = call->owners[block]) != 0) break;
        }
        call->refs[block]++;
    }
    if (num_done == call->count) return num_idle;
    while (num_done > 0) call->refs[call->blocks[--num_done]]--;
    return -1;
}

static PyObject *acquire(PyObject *self, PyObject *blocks)
{
    struct call call;
    if (begin(self, blocks, &call) != 0) return NULL;
    PyObject *nodes = PyList_New(0);
    Py_ssize_t num_idle = nodes == NULL ? -1 : acquire_all(&call, nodes);
    PyBuffer_Release(&call.view);
    if (num_idle >= 0) return tuple_of(2, (PyObject *[]){PyLong_FromSsize_t(num_idle), nodes});
    Py_XDECREF(nodes);
    return NULL;
}

/* Takes a reference from each block; adds the nodes of named ones that become idle to the list, and unnamed ones to `freed`.
 * How many named ones became idle; -1: an exception is set. */
static Py_ssize_t release_all(const struct call *call, PyObject *nodes, int32_t *freed, Py_ssize_t *num_freed)
{
    Py_ssize_t num_idle = 0;
    int32_t last = -1;
    for (Py_ssize_t i = 0; i < call->count; i++) {
        int32_t block = call->blocks[i];
        if (call->refs[block] < 1) {
            PyErr_Format(PyExc_AssertionError, "block %d is released more often than held", block);
            return -1;
        }
        if (--call->refs[block] != 0) continue;
        if (call->owners[block] < 0) {
            freed[(*num_freed)++] = block;
        } else {
            num_idle++;
            if (call->owners[block] != last && append(nodes, last = call->owners[block]) != 0) return -1;
        }
    }
    return num_idle;
}

static PyObject *release(PyObject *self, PyObject *blocks)
{
    int32_t some[256], *freed = some;
    Py_ssize_t num_freed = 0;
    struct call call;
    if (begin(self, blocks, &call) != 0) return NULL;
    PyObject *nodes = PyList_New(0), *result = NULL;
    if (call.count > (Py_ssize_t)(sizeof some / sizeof *some)) freed = malloc((size_t)call.count * sizeof *freed);
    if (freed == NULL) PyErr_NoMemory();
    Py_ssize_t num_idle = nodes == NULL || freed == NULL ? -1 : release_all(&call, nodes, freed, &num_freed);
    if (num_idle >= 0) {
        PyObject *ids = PyBytes_FromStringAndSize((const char *)freed, num_freed * (Py_ssize_t)sizeof *freed);
        result = tuple_of(3, (PyObject *[]){PyLong_FromSsize_t(num_idle), nodes, ids});
    } else {
        Py_XDECREF(nodes);
    }
    if (freed != some) free(freed);
    PyBuffer_Release(&call.view);
    return result;
}

static PyObject *held(PyObject *self, PyObject *blocks)
{
    struct call call;
    if (open_call(self, blocks, &call) != 0) return NULL;
    Py_ssize_t count = call.count;
    while (count > 0 && is_known(&call, call.blocks[count - 1]) && call.refs[call.blocks[count - 1]] == 0) count--;
    PyBuffer_Release(&call.view);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(count);
}

static PyObject *assign(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    struct call call;
    if (!has_args(num_args, 2)) return NULL;
    int32_t node = (int32_t)PyLong_AsLong(args[1]);
    if (PyErr_Occurred() || begin(self, args[0], &call) != 0) return NULL;
    for (Py_ssize_t i = 0; i < call.count; i++) call.owners[call.blocks[i]] = node;
    PyBuffer_Release(&call.view);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"take", take, METH_O, "take(blocks): one reference and one generation more each"},
    {"acquire", acquire, METH_O, "acquire(blocks) -> (number that had no reference, nodes of those)"},
    {"release", release, METH_O, "release(blocks) -> (number of named ones without a reference, their nodes, ids of unnamed ones)"},
    {"held", held, METH_O, "held(blocks) -> number of blocks up to the last one with a reference"},
    {"assign", (PyCFunction)(void (*)(void))assign, METH_FASTCALL, "assign(blocks, node)"},
    {NULL, NULL, 0, NULL},
};

static void dealloc(PyObject *self)
{
    BlockCounters *counters = (BlockCounters *)(void *)self;
    PyBuffer_Release(&counters->refs); /* does nothing to one that was never opened */
    PyBuffer_Release(&counters->generations);
    PyBuffer_Release(&counters->owners);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *new_counters(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *arrays[3];
    if (!PyArg_ParseTuple(args, "OOO", &arrays[0], &arrays[1], &arrays[2])) return NULL;
    PyObject *self = type->tp_alloc(type, 0); /* zeroed */
    if (self == NULL) return NULL;
    BlockCounters *counters = (BlockCounters *)(void *)self;
    Py_buffer *views[] = {&counters->refs, &counters->generations, &counters->owners};
    for (int i = 0; i < 3; i++)
        if (PyObject_GetBuffer(arrays[i], views[i], PyBUF_WRITABLE) != 0 || views[i]->len != views[0]->len) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the arrays differ in size");
            Py_DECREF(self);
            return NULL;
        }
    return self;
}

static PyTypeObject TYPE = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvrelay_ledger.BlockCounters",
    .tp_basicsize = sizeof(BlockCounters),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "BlockCounters(refs, generations, owners): over three writable buffers of 32-bit ints, one for each block",
    .tp_methods = METHODS,
    .tp_new = new_counters,
    .tp_dealloc = dealloc,
};

static Py_ssize_t num_common(const Py_buffer *one, Py_ssize_t first, const Py_buffer *other, Py_ssize_t position, Py_ssize_t most)
{
    Py_ssize_t left = one->len / HASH_BYTES - first, right = other->len / HASH_BYTES - position, count = 0;
    if (first < 0 || position < 0) return 0;
    most = most < left ? most : left;
    most = most < right ? most : right;
    const char *a = (const char *)one->buf + first * HASH_BYTES, *b = (const char *)other->buf + position * HASH_BYTES;
    while (count < most && memcmp(a + count * HASH_BYTES, b + count * HASH_BYTES, HASH_BYTES) == 0) count++;
    return count;
}

static PyObject *common(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer one, other;
    if (!has_args(num_args, 5)) return NULL;
    Py_ssize_t first = PyLong_AsSsize_t(args[1]), position = PyLong_AsSsize_t(args[3]), most = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &one, PyBUF_SIMPLE) != 0) return NULL;
    Py_ssize_t count = -1;
    if (PyObject_GetBuffer(args[2], &other, PyBUF_SIMPLE) == 0) {
        count = num_common(&one, first, &other, position, most);
        PyBuffer_Release(&other);
    }
    PyBuffer_Release(&one);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static PyMethodDef FUNCTIONS[] = {
    {"common", (PyCFunction)(void (*)(void))common, METH_FASTCALL,
     "common(run, first, other, position, most) -> number of hashes that run[first:] and other[position:] have in common"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "kvrelay_ledger", .m_size = -1, .m_methods = FUNCTIONS};

PyMODINIT_FUNC PyInit_kvrelay_ledger(void)
{
    PyObject *module = PyType_Ready(&TYPE) == 0 ? PyModule_Create(&MODULE) : NULL;
    if (module != NULL && PyModule_AddObjectRef(module, "BlockCounters", (PyObject *)&TYPE) != 0) Py_CLEAR(module);
    return module;
}
