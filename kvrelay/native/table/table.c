/* Where each name of 16 bytes stands in a row of slots: builtins (see block_table.py, which has the same in Python).
 *
 * Owns the slots' numbers alone. The names stand in the caller's buffer, 16 bytes for each slot, which every call is given.
 * Open addressing with linear probing, in shards, so that none takes long to grow; removing closes the gap that it makes.
 */

#include <stdlib.h>
#include <string.h>

#include "python.h"

extern ptrdiff_t PyBytes_Size(PyObject *bytes);
extern int PyList_SetItem(PyObject *list, ptrdiff_t index, PyObject *item); /* takes the item */
extern void PyErr_Clear(void);

#define NAME 16
#define NUM_SHARDS 256
#define SMALLEST 8 /* entries of a shard that has any */
#define AHEAD 32   /* names that are looked for together: their entries lie all over memory, and are fetched meanwhile */

/* The low half of a name's hash, and above it its slot; 0: none, for slot 0 is nobody's. */
typedef uint64_t entry;

struct shard {
    entry *entries;
    uint32_t size, used; /* size: a power of two, or 0 */
};

struct table {
    uint64_t seed;
    ptrdiff_t count;
    struct shard shards[NUM_SHARDS];
};

static inline uint32_t slot_of(entry e) { return (uint32_t)(e >> 32); }
static inline entry make(uint32_t slot, uint64_t hash) { return (entry)slot << 32 | (uint32_t)hash; }

static inline uint64_t hash_of(const struct table *table, const uint8_t *name)
{
    uint64_t a, b;
    memcpy(&a, name, 8);
    memcpy(&b, name + 8, 8);
    __uint128_t product = (__uint128_t)(a ^ table->seed) * (b ^ 0x9e3779b97f4a7c15u);
    uint64_t mixed = (uint64_t)(product >> 64) ^ (uint64_t)product ^ a ^ (b << 32 | b >> 32);
    product = (__uint128_t)mixed * (table->seed | 1);
    return (uint64_t)(product >> 64) ^ (uint64_t)product;
}

static inline struct shard *shard_of(struct table *table, uint64_t hash) { return &table->shards[hash >> 56]; }

/* The entry of this name, or NULL. */
static inline entry *found(struct shard *shard, uint64_t hash, const uint8_t *name, const uint8_t *names)
{
    if (shard->size == 0) return NULL;
    uint32_t mask = shard->size - 1;
    for (uint32_t i = (uint32_t)hash & mask; shard->entries[i] != 0; i = (i + 1) & mask)
        if ((uint32_t)shard->entries[i] == (uint32_t)hash
            && memcmp(names + (size_t)slot_of(shard->entries[i]) * NAME, name, NAME) == 0)
            return &shard->entries[i];
    return NULL;
}

/* The entry of this slot, whose name has this hash, or NULL. */
static inline entry *found_slot(struct shard *shard, uint64_t hash, uint32_t slot)
{
    if (shard->size == 0) return NULL;
    uint32_t mask = shard->size - 1;
    for (uint32_t i = (uint32_t)hash & mask; shard->entries[i] != 0; i = (i + 1) & mask)
        if (shard->entries[i] == make(slot, hash)) return &shard->entries[i];
    return NULL;
}

static void put(struct shard *shard, entry e)
{
    uint32_t mask = shard->size - 1, i = (uint32_t)e & mask;
    while (shard->entries[i] != 0) i = (i + 1) & mask;
    shard->entries[i] = e;
}

/* 0, or -1: no memory, and nothing has changed. */
static int resize(struct shard *shard, uint32_t size)
{
    struct shard larger = {calloc(size, sizeof(entry)), size, shard->used};
    if (larger.entries == NULL) return -1;
    for (uint32_t i = 0; i < shard->size; i++)
        if (shard->entries[i] != 0) put(&larger, shard->entries[i]);
    free(shard->entries);
    *shard = larger;
    return 0;
}

static int insert(struct table *table, uint64_t hash, uint32_t slot)
{
    struct shard *shard = shard_of(table, hash);
    if (4 * (uint64_t)(shard->used + 1) > 3 * (uint64_t)shard->size
        && resize(shard, shard->size ? 2 * shard->size : SMALLEST) != 0)
        return -1;
    put(shard, make(slot, hash));
    shard->used++;
    table->count++;
    return 0;
}

static void take_out(struct table *table, struct shard *shard, entry *e)
{
    uint32_t mask = shard->size - 1, hole = (uint32_t)(e - shard->entries);
    for (uint32_t i = (hole + 1) & mask; shard->entries[i] != 0; i = (i + 1) & mask) {
        uint32_t home = (uint32_t)shard->entries[i] & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) { /* it may stand where the hole is */
            shard->entries[hole] = shard->entries[i];
            hole = i;
        }
    }
    shard->entries[hole] = 0;
    shard->used--;
    table->count--;
    if (shard->size > SMALLEST && 8 * (uint64_t)shard->used < shard->size) resize(shard, shard->size / 2); /* or it stays */
}

/* The table, and the caller's names; NULL with an exception set. */
static struct table *opened(PyObject *self, PyObject *names, Py_buffer *view, int flags)
{
    struct table *table = PyCapsule_GetPointer(self, NULL);
    return table == NULL || PyObject_GetBuffer(names, view, flags) != 0 ? NULL : table;
}

/* The bytes of a list's item, NULL: they are no name (without an exception). */
static inline const uint8_t *name_at(PyObject *list, ptrdiff_t index)
{
    PyObject *item = PyList_GetItem(list, index);
    if (item != NULL && PyBytes_Size(item) == NAME) return (const uint8_t *)PyBytes_AsString(item);
    PyErr_Clear();
    return NULL;
}

static int set_number(PyObject *list, ptrdiff_t index, ptrdiff_t value)
{
    PyObject *number = PyLong_FromSsize_t(value);
    return number == NULL ? -1 : PyList_SetItem(list, index, number);
}

static int find_some(struct table *table, const Py_buffer *names, const Py_buffer *kinds, PyObject *hashes, ptrdiff_t first,
                     ptrdiff_t count, PyObject *slots, PyObject *found_kinds)
{
    const uint8_t *wanted[AHEAD];
    uint64_t hash[AHEAD];
    for (ptrdiff_t i = 0; i < count; i++) {
        wanted[i] = name_at(hashes, first + i);
        if (wanted[i] == NULL) continue;
        hash[i] = hash_of(table, wanted[i]);
        struct shard *shard = shard_of(table, hash[i]);
        if (shard->size != 0) __builtin_prefetch(&shard->entries[(uint32_t)hash[i] & (shard->size - 1)]);
    }
    for (ptrdiff_t i = 0; i < count; i++) {
        entry *e = wanted[i] == NULL ? NULL : found(shard_of(table, hash[i]), hash[i], wanted[i], names->buf);
        ptrdiff_t slot = e == NULL ? 0 : slot_of(*e);
        if (set_number(slots, first + i, slot) != 0 || set_number(found_kinds, first + i, ((const int32_t *)kinds->buf)[slot]) != 0)
            return -1;
    }
    return 0;
}

/* find(names, kinds, list): (the slot of each name, 0 where it has none; that slot's number in `kinds`, int32). */
static PyObject *find(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    Py_buffer names, kinds;
    if (!has_args(num_args, 3)) return NULL;
    ptrdiff_t count = PyList_Size(args[2]);
    struct table *table = count < 0 ? NULL : opened(self, args[0], &names, PyBUF_SIMPLE);
    if (table == NULL) return NULL;
    if (PyObject_GetBuffer(args[1], &kinds, PyBUF_SIMPLE) != 0) {
        PyBuffer_Release(&names);
        return NULL;
    }
    PyObject *both = PyTuple_New(2), *slots = PyList_New(count), *found_kinds = PyList_New(count);
    int failed = both == NULL || slots == NULL || found_kinds == NULL;
    if (!failed) {
        PyTuple_SetItem(both, 0, slots);
        PyTuple_SetItem(both, 1, found_kinds);
    }
    for (ptrdiff_t i = 0; !failed && i < count; i += AHEAD)
        failed = find_some(table, &names, &kinds, args[2], i, count - i < AHEAD ? count - i : AHEAD, slots, found_kinds) != 0;
    PyBuffer_Release(&kinds);
    PyBuffer_Release(&names);
    if (!failed) return both;
    if (both != NULL) Py_DecRef(both); /* with the lists, where it has them */
    return NULL;
}

/* find_one(names, name): its slot, 0: it has none. */
static PyObject *find_one(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    Py_buffer names;
    if (!has_args(num_args, 2)) return NULL;
    struct table *table = opened(self, args[0], &names, PyBUF_SIMPLE);
    if (table == NULL) return NULL;
    ptrdiff_t slot = 0;
    if (PyBytes_Size(args[1]) == NAME) {
        const uint8_t *name = (const uint8_t *)PyBytes_AsString(args[1]);
        uint64_t hash = hash_of(table, name);
        entry *e = found(shard_of(table, hash), hash, name, names.buf);
        slot = e == NULL ? 0 : slot_of(*e);
    } else {
        PyErr_Clear();
    }
    PyBuffer_Release(&names);
    return PyLong_FromSsize_t(slot);
}

static PyObject *no_memory(void) { return PyErr_Format(PyExc_MemoryError, "no memory for a table of names"); }

static PyObject *outside(ptrdiff_t slot) { return PyErr_Format(PyExc_ValueError, "there is no slot %zd", slot); }

static int is_outside(const Py_buffer *names, ptrdiff_t slot) { return slot < 1 || slot >= names->len / NAME || slot > UINT32_MAX; }

/* add(names, list, first): names that have no slot, each once, are written to the slots from `first` on, and known from now on. */
static PyObject *add(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    Py_buffer names;
    if (!has_args(num_args, 3)) return NULL;
    ptrdiff_t count = PyList_Size(args[1]), first = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() != NULL) return NULL;
    struct table *table = opened(self, args[0], &names, PyBUF_WRITABLE);
    if (table == NULL) return NULL;
    PyObject *result = NULL;
    if (count > 0 && (is_outside(&names, first) || is_outside(&names, first + count - 1))) {
        outside(first + count - 1);
        goto done;
    }
    for (ptrdiff_t begin = 0; begin < count; begin += AHEAD) {
        ptrdiff_t some = count - begin < AHEAD ? count - begin : AHEAD;
        uint64_t hash[AHEAD];
        for (ptrdiff_t i = 0; i < some; i++) {
            const uint8_t *name = name_at(args[1], begin + i);
            if (name == NULL) {
                PyErr_SetString(PyExc_ValueError, "a name has 16 bytes");
                goto done;
            }
            memcpy((uint8_t *)names.buf + (first + begin + i) * NAME, name, NAME);
            hash[i] = hash_of(table, name);
            struct shard *shard = shard_of(table, hash[i]);
            if (shard->size != 0) __builtin_prefetch(&shard->entries[(uint32_t)hash[i] & (shard->size - 1)], 1);
        }
        for (ptrdiff_t i = 0; i < some; i++)
            if (insert(table, hash[i], (uint32_t)(first + begin + i)) != 0) {
                no_memory();
                goto done;
            }
    }
    result = none();
done:
    PyBuffer_Release(&names);
    return result;
}

/* Calls `each` with every slot of a list, and its name's hash; 0, or -1 with an exception set. */
static int for_slots(struct table *table, Py_buffer *names, PyObject *slots, int (*each)(struct table *, Py_buffer *, uint32_t, uint64_t, void *),
                     void *context)
{
    ptrdiff_t count = PyList_Size(slots);
    for (ptrdiff_t begin = 0; begin < count; begin += AHEAD) {
        ptrdiff_t some = count - begin < AHEAD ? count - begin : AHEAD;
        uint64_t hash[AHEAD];
        uint32_t slot[AHEAD];
        for (ptrdiff_t i = 0; i < some; i++) {
            ptrdiff_t number = PyLong_AsSsize_t(PyList_GetItem(slots, begin + i));
            if (PyErr_Occurred() != NULL) return -1;
            if (is_outside(names, number)) {
                outside(number);
                return -1;
            }
            slot[i] = (uint32_t)number;
            hash[i] = hash_of(table, (const uint8_t *)names->buf + number * NAME);
            struct shard *shard = shard_of(table, hash[i]);
            if (shard->size != 0) __builtin_prefetch(&shard->entries[(uint32_t)hash[i] & (shard->size - 1)], 1);
        }
        for (ptrdiff_t i = 0; i < some; i++)
            if (each(table, names, slot[i], hash[i], context) != 0) return -1;
    }
    return count < 0 ? -1 : 0;
}

static int forget_slot(struct table *table, Py_buffer *names, uint32_t slot, uint64_t hash, void *context)
{
    struct shard *shard = shard_of(table, hash);
    entry *e = found_slot(shard, hash, slot);
    if (e != NULL) take_out(table, shard, e);
    return 0;
}

/* remove(names, list): the names in these slots have none any more. */
static PyObject *remove_slots(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    Py_buffer names;
    struct table *table = has_args(num_args, 2) ? opened(self, args[0], &names, PyBUF_SIMPLE) : NULL;
    if (table == NULL) return NULL;
    int failed = for_slots(table, &names, args[1], forget_slot, NULL);
    PyBuffer_Release(&names);
    return failed ? NULL : none();
}

static int move_slot(struct table *table, Py_buffer *names, uint32_t slot, uint64_t hash, void *context)
{
    ptrdiff_t target = (*(ptrdiff_t *)context)++;
    entry *e = found_slot(shard_of(table, hash), hash, slot);
    if (is_outside(names, target)) {
        outside(target);
        return -1;
    }
    if (e != NULL) *e = make((uint32_t)target, hash);
    uint8_t *all = names->buf;
    memmove(all + target * NAME, all + (size_t)slot * NAME, NAME);
    return 0;
}

/* move(names, list, first): the names in these slots stand in the ones from `first` on; one's new slot is no later one's old. */
static PyObject *move(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    Py_buffer names;
    if (!has_args(num_args, 3)) return NULL;
    ptrdiff_t first = PyLong_AsSsize_t(args[2]);
    struct table *table = PyErr_Occurred() != NULL ? NULL : opened(self, args[0], &names, PyBUF_WRITABLE);
    if (table == NULL) return NULL;
    int failed = for_slots(table, &names, args[1], move_slot, &first);
    PyBuffer_Release(&names);
    return failed ? NULL : none();
}

/* count(): names that have a slot. */
static PyObject *count(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    struct table *table = has_args(num_args, 0) ? PyCapsule_GetPointer(self, NULL) : NULL;
    return table == NULL ? NULL : PyLong_FromSsize_t(table->count);
}

/* num_bytes(): of memory. */
static PyObject *num_bytes(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    struct table *table = has_args(num_args, 0) ? PyCapsule_GetPointer(self, NULL) : NULL;
    if (table == NULL) return NULL;
    ptrdiff_t total = sizeof *table;
    for (int i = 0; i < NUM_SHARDS; i++) total += (ptrdiff_t)table->shards[i].size * (ptrdiff_t)sizeof(entry);
    return PyLong_FromSsize_t(total);
}

static void forget(PyObject *capsule)
{
    struct table *table = PyCapsule_GetPointer(capsule, NULL);
    for (int i = 0; i < NUM_SHARDS; i++) free(table->shards[i].entries);
    free(table);
}

static PyMethodDef FUNCTIONS[] = {
    {"find", find, METH_FASTCALL, NULL}, {"find_one", find_one, METH_FASTCALL, NULL}, {"add", add, METH_FASTCALL, NULL},
    {"move", move, METH_FASTCALL, NULL}, {"remove", remove_slots, METH_FASTCALL, NULL}, {"count", count, METH_FASTCALL, NULL},
    {"num_bytes", num_bytes, METH_FASTCALL, NULL},
};

/* make(seed): the functions above, for a new table. */
static PyObject *new_table(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    if (!has_args(num_args, 1)) return NULL;
    ptrdiff_t seed = PyLong_AsSsize_t(args[0]);
    if (PyErr_Occurred() != NULL) return NULL;
    struct table *table = calloc(1, sizeof *table);
    if (table == NULL) return no_memory();
    table->seed = (uint64_t)seed;
    PyObject *capsule = PyCapsule_New(table, NULL, forget);
    if (capsule == NULL) {
        free(table);
        return NULL;
    }
    PyObject *functions = builtins(FUNCTIONS, sizeof FUNCTIONS / sizeof *FUNCTIONS, capsule);
    Py_DecRef(capsule); /* the functions hold it */
    return functions;
}

#define MOST_COMPARED 1024 /* names; twice as many places on the stack */

/* Whether a short list's names are known to be distinct at little cost: names that crowd are left to others. */
static int distinct(PyObject *list, ptrdiff_t count)
{
    uint16_t places[2 * MOST_COMPARED] = {0}; /* a name's number in the list, from 1 on */
    const uint8_t *names[MOST_COMPARED];
    ptrdiff_t patience = 4 * count + 64;
    for (ptrdiff_t i = 0; i < count; i++) {
        uint64_t a, b;
        if ((names[i] = name_at(list, i)) == NULL) return 0;
        memcpy(&a, names[i], 8);
        memcpy(&b, names[i] + 8, 8);
        size_t place = (a ^ (b << 32 | b >> 32)) * 0x9e3779b97f4a7c15u >> 53;
        for (; places[place] != 0; place = (place + 1) % (2 * MOST_COMPARED))
            if (patience-- == 0 || memcmp(names[places[place] - 1], names[i], NAME) == 0) return 0;
        places[place] = (uint16_t)(i + 1);
    }
    return 1;
}

/* are_distinct(list): 1: these are names, and no two are the same. 0: they are not, or it is not known. */
static PyObject *are_distinct(PyObject *self, PyObject *const *args, ptrdiff_t num_args)
{
    if (!has_args(num_args, 1)) return NULL;
    ptrdiff_t count = PyList_Size(args[0]);
    return count < 0 ? NULL : PyLong_FromSsize_t(count <= MOST_COMPARED && distinct(args[0], count));
}

static PyMethodDef LIBRARY[] = {
    {"make", new_table, METH_FASTCALL, NULL},
    {"are_distinct", are_distinct, METH_FASTCALL, NULL},
};

PyObject *kr_builtins(void) { return builtins(LIBRARY, sizeof LIBRARY / sizeof *LIBRARY, NULL); }
