/* What our C takes from CPython's stable ABI (3.11 and later), so that no header of Python's is needed.
 *
 * The running interpreter has the symbols. Functions made of these definitions are called like Python's own builtins,
 * with the interpreter's lock held: about 60 ns a call, where ctypes takes 500 and more.
 */

#ifndef KVRELAY_PYTHON_H
#define KVRELAY_PYTHON_H

#include <stddef.h>
#include <stdint.h>

typedef struct object PyObject;

typedef struct {
    void *buf;
    PyObject *obj;
    ptrdiff_t len, itemsize;
    int readonly, ndim;
    char *format;
    ptrdiff_t *shape, *strides, *suboffsets;
    void *internal;
} Py_buffer;

typedef PyObject *(*fast_function)(PyObject *self, PyObject *const *args, ptrdiff_t num_args);

typedef struct {
    const char *name;
    fast_function call;
    int flags;
    const char *doc;
} PyMethodDef;

#define METH_FASTCALL 0x0080
#define PyBUF_SIMPLE 0
#define PyBUF_WRITABLE 1

extern PyObject *PyExc_AssertionError, *PyExc_MemoryError, *PyExc_OverflowError, *PyExc_TypeError, *PyExc_ValueError;
extern PyObject _Py_NoneStruct;

extern PyObject *PyCFunction_NewEx(PyMethodDef *definition, PyObject *self, PyObject *module);
extern PyObject *PyCapsule_New(void *pointer, const char *name, void (*destructor)(PyObject *));
extern void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
extern void Py_IncRef(PyObject *object);
extern void Py_DecRef(PyObject *object);
extern PyObject *PyTuple_New(ptrdiff_t size);
extern int PyTuple_SetItem(PyObject *tuple, ptrdiff_t index, PyObject *item); /* takes the item */
extern ptrdiff_t PyList_Size(PyObject *list);
extern PyObject *PyList_GetItem(PyObject *list, ptrdiff_t index); /* borrowed */
extern PyObject *PyList_New(ptrdiff_t size);
extern int PyList_Append(PyObject *list, PyObject *item);
extern long PyLong_AsLong(PyObject *number);
extern ptrdiff_t PyLong_AsSsize_t(PyObject *number);
extern PyObject *PyLong_FromSsize_t(ptrdiff_t value);
extern PyObject *PyBytes_FromStringAndSize(const char *from, ptrdiff_t size);
extern char *PyBytes_AsString(PyObject *bytes);
extern int PyObject_GetBuffer(PyObject *object, Py_buffer *view, int flags);
extern void PyBuffer_Release(Py_buffer *view);
extern PyObject *PyErr_Occurred(void);
extern void PyErr_SetString(PyObject *type, const char *text);
extern PyObject *PyErr_Format(PyObject *type, const char *format, ...);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *state);

/* A tuple of builtins that have `self` (or NULL) in common; NULL with an exception set. */
static inline PyObject *builtins(PyMethodDef *definitions, ptrdiff_t count, PyObject *self)
{
    PyObject *functions = PyTuple_New(count);
    for (ptrdiff_t i = 0; functions != NULL && i < count; i++) {
        PyObject *function = PyCFunction_NewEx(&definitions[i], self, NULL);
        if (function == NULL || PyTuple_SetItem(functions, i, function) != 0) {
            Py_DecRef(functions);
            return NULL;
        }
    }
    return functions;
}

/* Whether a call has so many arguments; if not, an exception is set. */
static inline int has_args(ptrdiff_t given, ptrdiff_t wanted)
{
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
    return 0;
}

static inline PyObject *none(void)
{
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

#endif
