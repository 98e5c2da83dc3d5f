/* libcuda.so.1 without a driver: what torch and Triton load by name. Launches are counted by the runtime (runtime.c). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

static int launch(void *stream) {
    int (*counted)(void *) = dlsym(RTLD_DEFAULT, "fake_driver_launch");
    return counted ? counted(stream) : 0;
}
int cuInit() { return 0; }
int cuDeviceGet(int *out, int n) { *out = n; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGetAttribute(int *value, int what, int n) {
    switch (what) {
    case 75: *value = 9; break;        /* compute capability, major */
    case 76: *value = 0; break;        /* minor */
    case 16: *value = 132; break;      /* multiprocessors */
    case 97: *value = 232448; break;   /* shared memory of a block, opt-in */
    case 10: *value = 32; break;       /* warp */
    case 12: case 82: *value = 65536; break; /* registers of a block, of a multiprocessor */
    case 36: *value = 1980000; break;  /* kHz */
    case 37: *value = 5120; break;     /* bits of the memory bus */
    default: *value = 1024;
    }
    return 0;
}
int cuCtxGetCurrent(void **out) { *out = (void *)8; return 0; }
int cuCtxGetDevice(int *out) { *out = 0; return 0; }
int cuCtxGetLimit(size_t *value, int what) { *value = 1024; return 0; }
int cuFuncGetAttribute(int *value, int what, void *function) { *value = what == 0 ? 1024 : what == 4 ? 64 : 0; return 0; }
int cuModuleGetFunction(void **out, void *module, const char *name) { *out = (void *)8; return 0; }
int cuModuleLoadData(void **out, const void *image) { *out = (void *)8; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **args, void **extra) {
    return launch(stream);
}
typedef struct { unsigned sizes[7]; void *stream; } Config; /* the beginning of CUlaunchConfig */
int cuLaunchKernelEx(const Config *config, void *f, void **args, void **extra) { return launch(config->stream); }
int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **args) {
    return launch(stream);
}
/* CUDA IPC is the runtime's: a process that does not run over it has none. A handle of 64 bytes comes by value. */
typedef struct { char reserved[64]; } Handle;
#define FORWARDS(name, to, parameters, arguments) \
    int name parameters { int (*call) parameters = dlsym(RTLD_DEFAULT, #to); return call ? call arguments : 801; }
FORWARDS(cuIpcGetMemHandle, cudaIpcGetMemHandle, (Handle *out, void *p), (out, p))
FORWARDS(cuIpcOpenMemHandle_v2, cudaIpcOpenMemHandle, (void **out, Handle handle, unsigned flags), (out, handle, flags))
FORWARDS(cuIpcCloseMemHandle, cudaIpcCloseMemHandle, (void *p), (p))
FORWARDS(cuMemHostRegister_v2, cudaHostRegister, (void *p, unsigned long size, unsigned flags), (p, size, flags))
FORWARDS(cuMemHostUnregister, cudaHostUnregister, (void *p), (p))
FORWARDS(cuPointerGetAttribute, fake_attribute, (void *value, int what, void *p), (value, what, p))
int cuGetErrorName(int error, const char **name) {
    switch (error) {
    case 1: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case 201: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case 205: *name = "CUDA_ERROR_MAP_FAILED"; break;
    case 217: *name = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"; break;
    default: *name = "CUDA_ERROR_UNKNOWN";
    }
    return 0;
}
#define IGNORES(name) int name() { return 0; }
IGNORES(cuCtxPopCurrent_v2) IGNORES(cuCtxPushCurrent_v2) IGNORES(cuCtxSetCurrent) IGNORES(cuCtxSetLimit) IGNORES(cuDevicePrimaryCtxGetState)
IGNORES(cuDevicePrimaryCtxRetain) IGNORES(cuFuncSetAttribute) IGNORES(cuFuncSetCacheConfig) IGNORES(cuGetErrorString) IGNORES(cuLinkAddData_v2)
IGNORES(cuLinkComplete) IGNORES(cuLinkCreate_v2) IGNORES(cuModuleLoad) IGNORES(cuModuleLoadDataEx) IGNORES(cuModuleUnload)
IGNORES(cuOccupancyMaxActiveBlocksPerMultiprocessor) IGNORES(cuOccupancyMaxActiveClusters)
IGNORES(cuTensorMapEncodeIm2col) IGNORES(cuTensorMapEncodeTiled)
