/* What the block pool does to many blocks at once, as builtins (see ledger.py, which has the same in Python).
 *
 * Blocks come as any buffer of int32. Whoever is asked for nodes names each once for every run of its blocks.
 */

#include <stdlib.h>
#include <string.h>

#include "python.h"

#define DIGEST 16

/* Three arrays, one number each for every block; their memory is held until the functions are gone. */
struct ledger {
    Py_buffer refs, generations, owners;
};

struct table {
    Py_buffer view;
    const int32_t *blocks;
    ptrdiff_t count;
};

static int open_table(PyObject *object, struct table *table)
{
    if (PyObject_GetBuffer(object, &table->view, PyBUF_SIMPLE) != 0) return -1;
    table->blocks = table->view.buf, table->count = table->view.len / (ptrdiff_t)sizeof(int32_t);
    return 0;
}

/* The ledger, with every block of the table known to be in it; NULL with an exception set, and the table closed. */
static struct ledger *opened(PyObject *self, PyObject *object, struct table *table)
{
    struct ledger *ledger = PyCapsule_GetPointer(self, NULL);
    if (ledger == NULL || open_table(object, table) != 0) return NULL;
    uint32_t num_blocks = (uint32_t)(ledger->refs.len / (ptrdiff_t)sizeof(int32_t));
    for (ptrdiff_t i = 0; i < table->count; i++)
        if ((uint32_t)table->blocks[i] >= num_blocks) {
            PyErr_Format(PyExc_ValueError, "there is no block %d", table->blocks[i]);
            PyBuffer_Release(&table->view);
            return NULL;
        }
    return ledger;
}

/* Appends an int; 0, or -1 with an exception set. */
static int append(PyObject *list, ptrdiff_t value)
{
    PyObject *number = PyLong_FromSsize_t(value);
    int failed = number == NULL || PyList_Append(list, number) != 0;
    if (number != NULL) Py_DecRef(number);
    return failed ? -1 : 0;
}

/* A tuple of what is given, which it takes; NULL with an exception set when one of them is NULL. */
static PyObject *together(PyObject *const *items, ptrdiff_t count)
{
    PyObject *tuple = PyTuple_New(count);
    int failed = tuple == NULL;
    for (ptrdiff_t i = 0; i < count; i++) {
        failed |= items[i] == NULL;
        if (tuple != NULL && items[i] != NULL) PyTuple_SetItem(tuple, i, items[i]);
    }
    if (!failed) return tuple;
    if (tuple != NULL) Py_DecRef(tuple);
    return NULL;
}

/* take(blocks): one reference each, a generation more. */
static PyObject *take(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    struct table table;
    struct ledger *ledger = has_args(num_args, 1) ? opened(self, args[0], &table) : NULL;
    if (ledger == NULL) return NULL;
    int32_t *refs = ledger->refs.buf;
    uint32_t *generations = ledger->generations.buf;
    for (ptrdiff_t i = 0; i < table.count; i++) {
        refs[table.blocks[i]] = 1;
        generations[table.blocks[i]]++;
    }
    PyBuffer_Release(&table.view);
    return none();
}

/* acquire(blocks): a reference more; (how many had none, the nodes of those). */
static PyObject *acquire(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    struct table table;
    struct ledger *ledger = has_args(num_args, 1) ? opened(self, args[0], &table) : NULL;
    if (ledger == NULL) return NULL;
    int32_t *refs = ledger->refs.buf, *owners = ledger->owners.buf, last = -1;
    ptrdiff_t num_idle = 0, num_done = 0;
    PyObject *nodes = PyList_New(0);
    int failed = nodes == NULL;
    for (; num_done < table.count && !failed; num_done++) {
        int32_t block = table.blocks[num_done];
        if (refs[block] == 0) {
            if (owners[block] < 0) {
                PyErr_Format(PyExc_AssertionError, "block %d is free: nobody can acquire it", block);
                break;
            }
            num_idle++;
            if (owners[block] != last) failed = append(nodes, last = owners[block]) != 0;
        }
        refs[block]++;
    }
    if (failed || num_done < table.count) { /* as if nothing had been asked */
        while (num_done > 0) refs[table.blocks[--num_done]]--;
        if (nodes != NULL) Py_DecRef(nodes);
        PyBuffer_Release(&table.view);
        return NULL;
    }
    PyBuffer_Release(&table.view);
    return together((PyObject *[]){PyLong_FromSsize_t(num_idle), nodes}, 2);
}

/* release(blocks): a reference less; (how many named ones have none left, the nodes of those, packed ids of the unnamed ones). */
static PyObject *release(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    struct table table;
    struct ledger *ledger = has_args(num_args, 1) ? opened(self, args[0], &table) : NULL;
    if (ledger == NULL) return NULL;
    int32_t *refs = ledger->refs.buf, *owners = ledger->owners.buf, *freed = NULL, last = -1;
    ptrdiff_t num_idle = 0, num_free = 0;
    PyObject *nodes = PyList_New(0);
    int failed = nodes == NULL;
    for (ptrdiff_t i = 0; i < table.count && !failed; i++) {
        int32_t block = table.blocks[i];
        if (refs[block] < 1) {
            PyErr_Format(PyExc_AssertionError, "block %d is released more often than held", block);
            failed = 1;
        } else if (--refs[block] == 0 && owners[block] < 0) {
            if (freed == NULL) freed = malloc((table.count - i) * sizeof *freed);
            failed = freed == NULL;
            if (!failed) freed[num_free++] = block;
        } else if (refs[block] == 0) {
            num_idle++;
            if (owners[block] != last) failed = append(nodes, last = owners[block]) != 0;
        }
    }
    PyObject *all = NULL;
    if (!failed) {
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)freed, num_free * (ptrdiff_t)sizeof *freed);
        all = together((PyObject *[]){PyLong_FromSsize_t(num_idle), nodes, bytes}, 3);
    } else {
        if (PyErr_Occurred() == NULL) PyErr_SetString(PyExc_MemoryError, "no memory");
        if (nodes != NULL) Py_DecRef(nodes);
    }
    free(freed);
    PyBuffer_Release(&table.view);
    return all;
}

/* held(blocks): how many there are up to the last one with a reference. */
static PyObject *held(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    struct table table;
    struct ledger *ledger = has_args(num_args, 1) ? PyCapsule_GetPointer(self, NULL) : NULL;
    if (ledger == NULL || open_table(args[0], &table) != 0) return NULL;
    const int32_t *refs = ledger->refs.buf;
    ptrdiff_t count = table.count;
    while (count > 0 && refs[table.blocks[count - 1]] == 0) count--;
    PyBuffer_Release(&table.view);
    return PyLong_FromSsize_t(count);
}

/* assign(blocks, node): they are named in this node; -1: in none. */
static PyObject *assign(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    struct table table;
    if (!has_args(num_args, 2)) return NULL;
    int32_t node = (int32_t)PyLong_AsLong(args[1]);
    struct ledger *ledger = PyErr_Occurred() == NULL ? opened(self, args[0], &table) : NULL;
    if (ledger == NULL) return NULL;
    int32_t *owners = ledger->owners.buf;
    for (ptrdiff_t i = 0; i < table.count; i++) owners[table.blocks[i]] = node;
    PyBuffer_Release(&table.view);
    return none();
}

static ptrdiff_t num_common(const Py_buffer *one, ptrdiff_t first, const Py_buffer *other, ptrdiff_t position, ptrdiff_t most)
{
    ptrdiff_t left = one->len / DIGEST - first, right = other->len / DIGEST - position, count = 0;
    if (first < 0 || position < 0) return 0;
    most = most < left ? most : left;
    most = most < right ? most : right;
    const char *a = (const char *)one->buf + first * DIGEST, *b = (const char *)other->buf + position * DIGEST;
    while (count < most && memcmp(a + count * DIGEST, b + count * DIGEST, DIGEST) == 0) count++;
    return count;
}

/* common(run, first, other, position, most): how many hashes one from `first` and the other from `position` have in common. */
static PyObject *common(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    Py_buffer one, other;
    if (!has_args(num_args, 5)) return NULL;
    ptrdiff_t first = PyLong_AsSsize_t(args[1]), position = PyLong_AsSsize_t(args[3]), most = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred() != NULL || PyObject_GetBuffer(args[0], &one, PyBUF_SIMPLE) != 0) return NULL;
    ptrdiff_t count = -1;
    if (PyObject_GetBuffer(args[2], &other, PyBUF_SIMPLE) == 0) {
        count = num_common(&one, first, &other, position, most);
        PyBuffer_Release(&other);
    }
    PyBuffer_Release(&one);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static void let_go(struct ledger *ledger)
{
    PyBuffer_Release(&ledger->refs); /* of one that was never got: nothing happens */
    PyBuffer_Release(&ledger->generations);
    PyBuffer_Release(&ledger->owners);
    free(ledger);
}

static void forget(PyObject *capsule) { let_go(PyCapsule_GetPointer(capsule, NULL)); }

static PyMethodDef FUNCTIONS[] = {
    {"take", take, METH_FASTCALL, NULL},     {"acquire", acquire, METH_FASTCALL, NULL}, {"release", release, METH_FASTCALL, NULL},
    {"held", held, METH_FASTCALL, NULL},     {"assign", assign, METH_FASTCALL, NULL},   {"common", common, METH_FASTCALL, NULL},
};

/* bind(refs, generations, owners): the functions above, for these arrays of int32, one number for each block. */
static PyObject *bind(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    if (!has_args(num_args, 3)) return NULL;
    struct ledger *ledger = calloc(1, sizeof *ledger);
    if (ledger == NULL) return PyErr_Format(PyExc_MemoryError, "no memory");
    Py_buffer *views[] = {&ledger->refs, &ledger->generations, &ledger->owners};
    for (int i = 0; i < 3; i++)
        if (PyObject_GetBuffer(args[i], views[i], PyBUF_WRITABLE) != 0 || views[i]->len != views[0]->len) {
            if (PyErr_Occurred() == NULL) PyErr_SetString(PyExc_ValueError, "arrays of unlike sizes");
            let_go(ledger);
            return NULL;
        }
    PyObject *capsule = PyCapsule_New(ledger, NULL, forget);
    if (capsule == NULL) {
        let_go(ledger);
        return NULL;
    }
    PyObject *functions = builtins(FUNCTIONS, sizeof FUNCTIONS / sizeof *FUNCTIONS, capsule);
    Py_DecRef(capsule); /* the functions hold it */
    return functions;
}

static PyMethodDef BIND[] = {{"bind", bind, METH_FASTCALL, NULL}};

PyObject *kr_builtins(void) { return builtins(BIND, 1, NULL); }
