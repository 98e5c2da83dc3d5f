/* A CUDA runtime without a GPU, laid over libcudart with LD_PRELOAD: device memory is host memory, kernels do nothing.

   Real torch and FlashInfer run on it as on a GPU as far as the host sees: arguments of launches, plans, captures and
   copies are checked, and everything that costs time or breaks a capture is counted for each of its two devices.
   Not shown: numbers, races between streams, speed.

   Counters are read through fake_names and fake_counts (counters.py). */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <unistd.h>
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#undef cudaGetDriverEntryPointByVersion

#define DEVICES 2
#define MEMORY (80ull << 30)
#define MOST_COPIED (64ul << 20) /* longer copies are counted, not made */
#define MOST_SET (4ul << 20)

/* ---- counters */

enum {
    DEVICE_WAITS, STREAM_WAITS, EVENT_WAITS, SYNC_COPIES, PAGEABLE_TO_DEVICE, PAGEABLE_TO_HOST, PINNED_TO_DEVICE,
    PINNED_TO_HOST, ON_DEVICE, KERNELS, SIDE_KERNELS, GRAPH_LAUNCHES, CAPTURES, EVENTS, ALLOCATIONS, IPC_EXPORTS, IPC_OPENS,
    IPC_CLOSES, ILLEGAL, NUM_COUNTERS
};
const char *fake_names[NUM_COUNTERS + 1] = {
    "device_waits", "stream_waits", "event_waits", "sync_copies", "pageable_to_device", "pageable_to_host",
    "pinned_to_device", "pinned_to_host", "on_device", "kernels", "side_kernels", "graph_launches", "captures", "events",
    "allocations", "ipc_exports", "ipc_opens", "ipc_closes", "illegal", NULL};
long fake_counts[DEVICES][NUM_COUNTERS];
int fake_trace; /* 1: says every wait and copy on stderr; 2: kernels, too */

static __thread int device;
static __thread cudaError_t last_error;

static void count(int on, int what, const char *name) {
    __sync_fetch_and_add(&fake_counts[on][what], 1);
    if (fake_trace >= (what == KERNELS || what == SIDE_KERNELS ? 2 : 1)) fprintf(stderr, "[fake %d] %s %s\n", on, fake_names[what], name);
}
static cudaError_t fail(cudaError_t error) { return last_error = error; }
static cudaError_t illegal(const char *what, cudaError_t error) {
    fprintf(stderr, "[fake %d] ILLEGAL: %s\n", device, what);
    count(device, ILLEGAL, what);
    return fail(error);
}

/* ---- memory: which addresses are a device's, which are pinned */

typedef struct { char *begin; size_t size; int kind, device, fd, opened; } Range; /* fd: it is shared; opened: so often, from another process */
enum { PAGEABLE, DEVICE, PINNED };
static Range *ranges;
static int num_ranges, room;
static size_t used[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(Range range) {
    pthread_mutex_lock(&lock);
    if (num_ranges == room) ranges = realloc(ranges, (room = room ? 2 * room : 1024) * sizeof(Range));
    ranges[num_ranges++] = range;
    if (range.kind == DEVICE && !range.opened) used[range.device] += range.size;
    pthread_mutex_unlock(&lock);
}
static void remember(void *begin, size_t size, int kind) { add((Range){begin, size, kind, device, -1, 0}); }
static size_t forget(void *begin) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].begin == (char *)begin) {
            size = ranges[i].size;
            if (ranges[i].kind == DEVICE && !ranges[i].opened) used[ranges[i].device] -= size;
            if (ranges[i].fd >= 0) close(ranges[i].fd);
            ranges[i] = ranges[--num_ranges];
            break;
        }
    pthread_mutex_unlock(&lock);
    return size;
}
static Range range_of(const void *p) {
    Range found = {NULL, 0, PAGEABLE, 0, -1, 0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if ((char *)p >= ranges[i].begin && (char *)p < ranges[i].begin + ranges[i].size) { found = ranges[i]; break; }
    pthread_mutex_unlock(&lock);
    return found;
}
static void *map(size_t size) {
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}
static cudaError_t take(void **p, size_t size, size_t page, int kind) {
    size = (size + page - 1) / page * page;
    count(device, ALLOCATIONS, "");
    if ((kind == DEVICE && used[device] + size > MEMORY) || !(*p = map(size))) return fail(cudaErrorMemoryAllocation);
    remember(*p, size, kind);
    return 0;
}
static cudaError_t give(void *p) {
    size_t size = p ? forget(p) : 0;
    if (size) munmap(p, size);
    return 0;
}
cudaError_t cudaMalloc(void **p, size_t size) { return take(p, size, 2ul << 20, DEVICE); }
cudaError_t cudaFree(void *p) { return give(p); }
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { return take(p, size, 4096, PINNED); }
cudaError_t cudaFreeHost(void *p) { return give(p); }
cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) { remember(p, size, PINNED); return 0; }
cudaError_t cudaHostUnregister(void *p) { forget(p); return 0; }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) { *free_bytes = (*total = MEMORY) - used[device]; return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
    Range found = range_of(p);
    memset(out, 0, sizeof *out);
    out->type = found.kind == DEVICE ? cudaMemoryTypeDevice : found.kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->device = found.kind == DEVICE ? found.device : -2;
    out->devicePointer = found.kind ? (void *)p : NULL;
    out->hostPointer = found.kind == PINNED ? (void *)p : NULL;
    return 0;
}

/* ---- memory of other processes: an exported allocation becomes a memfd, which goes with its last user */

typedef struct { int pid, fd, device; unsigned long long inode; size_t size; } Shared; /* what a handle holds */
int fake_peers = 1; /* the devices reach each other's memory */

static int share(Range *range) { /* its bytes move into a memfd, at the same address */
    int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
    static char zeros[4096];
    if (fd < 0 || ftruncate(fd, range->size)) return -1;
    for (size_t at = 0; at < range->size; at += sizeof zeros)
        if (memcmp(range->begin + at, zeros, sizeof zeros) && pwrite(fd, range->begin + at, sizeof zeros, at) < 0) return -1;
    if (mmap(range->begin, range->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED) return -1;
    return range->fd = fd;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *p) {
    struct stat stat;
    Shared shared = {getpid(), -1};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].begin == (char *)p && ranges[i].kind == DEVICE && !ranges[i].opened) {
            shared.fd = ranges[i].fd >= 0 ? ranges[i].fd : share(&ranges[i]);
            shared.size = ranges[i].size, shared.device = ranges[i].device;
        }
    pthread_mutex_unlock(&lock);
    if (shared.fd < 0 || fstat(shared.fd, &stat)) return fail(cudaErrorInvalidValue);
    shared.inode = stat.st_ino;
    memset(out, 0, sizeof *out);
    memcpy(out, &shared, sizeof shared);
    count(shared.device, IPC_EXPORTS, "");
    return 0;
}
cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
    Shared shared;
    struct stat stat;
    char path[64];
    memcpy(&shared, &handle, sizeof shared);
    if (shared.pid == getpid()) return fail(cudaErrorDeviceUninitialized);
    if (shared.device != device && !fake_peers) return fail(cudaErrorPeerAccessUnsupported);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.pid, shared.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC); /* not once its process has gone */
    if (fd < 0) return fail(cudaErrorMapBufferObjectFailed);
    pthread_mutex_lock(&lock);
    Range *known = NULL;
    for (int i = 0; i < num_ranges && !known; i++)
        if (ranges[i].opened && !fstat(ranges[i].fd, &stat) && stat.st_ino == shared.inode) known = &ranges[i];
    if (known) known->opened++, *out = known->begin;
    pthread_mutex_unlock(&lock);
    if (!known) {
        if (fstat(fd, &stat) || stat.st_ino != shared.inode ||
            (*out = mmap(NULL, shared.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0)) == MAP_FAILED) {
            close(fd);
            return fail(cudaErrorMapBufferObjectFailed);
        }
        add((Range){*out, shared.size, DEVICE, shared.device, fd, 1});
    } else close(fd);
    count(device, IPC_OPENS, "");
    return 0;
}
cudaError_t cudaIpcCloseMemHandle(void *p) {
    Range found = range_of(p);
    if (!found.opened || found.begin != (char *)p) return illegal("the end of no map", cudaErrorInvalidValue);
    count(device, IPC_CLOSES, "");
    if (found.opened == 1) return give(p);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].begin == (char *)p) ranges[i].opened--;
    pthread_mutex_unlock(&lock);
    return 0;
}
/* cuPointerGetAttribute (driver.c): what CUDA IPC asks about an address. Returns 0 for other questions. */
int fake_attribute(unsigned long long *value, int what, const void *p) {
    Range found = range_of(p);
    if (what == 10) *(int *)value = found.kind == DEVICE && !found.opened;
    else if (what == 11 || what == 12) {
        if (!found.kind) return cudaErrorInvalidValue;
        *value = what == 11 ? (unsigned long long)found.begin : found.size;
    }
    return 0;
}

/* ---- streams and captures */

typedef struct { int device, capturing; unsigned long long id; } Stream;
static Stream defaults[DEVICES] = {{0, 0, 0}, {1, 0, 0}};
static __thread Stream *captured; /* by this thread: what may not happen in a capture may in other threads */
static unsigned long long next_id = 1;

static Stream *of(cudaStream_t stream) { return (size_t)stream <= 2 ? &defaults[device] : (Stream *)stream; }
#define NOT_IN_CAPTURE(name) do { if (captured) return illegal(name " in a capture", cudaErrorStreamCaptureUnsupported); } while (0)

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->device = device;
    *out = (cudaStream_t)stream;
    return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return 0; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return 0; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return 0; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    NOT_IN_CAPTURE("cudaStreamSynchronize");
    count(of(stream)->device, STREAM_WAITS, "");
    return 0;
}
cudaError_t cudaDeviceSynchronize(void) { NOT_IN_CAPTURE("cudaDeviceSynchronize"); count(device, DEVICE_WAITS, ""); return 0; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned flags) { call(s, 0, data); return 0; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) { call(data); return 0; }
static enum cudaStreamCaptureStatus status_of(cudaStream_t s) {
    return of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out) { *out = status_of(s); return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *out, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *size) {
    *out = status_of(s);
    if (id) *id = of(s)->id;
    if (graph) *graph = (cudaGraph_t)8;
    if (size) *size = 0;
    return 0;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    if ((size_t)s <= 2) return illegal("a capture on the default stream", cudaErrorStreamCaptureUnsupported);
    captured = of(s);
    captured->capturing = 1;
    captured->id = __sync_fetch_and_add(&next_id, 1);
    count(captured->device, CAPTURES, "");
    return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    *graph = NULL;
    if (!of(s)->capturing) return illegal("the end of no capture", cudaErrorIllegalState);
    of(s)->capturing = 0;
    captured = NULL;
    *graph = malloc(8);
    return 0;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *size) { *size = 1; return 0; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) { *out = malloc(8); return 0; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) { count(of(s)->device, GRAPH_LAUNCHES, ""); return 0; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return 0; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return 0; }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) { return 0; }

/* ---- events: of one device, as its streams are */

typedef struct { int device; } Event;
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    Event *event = malloc(sizeof *event);
    event->device = device;
    *out = (cudaEvent_t)event;
    return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned flags) {
    if (((Event *)event)->device != of(s)->device) return illegal("an event on another device's stream", cudaErrorInvalidResourceHandle);
    count(of(s)->device, EVENTS, "");
    return 0;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) { return cudaEventRecordWithFlags(event, s, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) { NOT_IN_CAPTURE("cudaEventQuery"); return 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    NOT_IN_CAPTURE("cudaEventSynchronize");
    count(((Event *)event)->device, EVENT_WAITS, "");
    return 0;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) { *ms = 1; return 0; }

/* ---- copies */

static cudaError_t copy(void *to, const void *from, size_t size, int waits, cudaStream_t s) {
    Range target = range_of(to), source = range_of(from);
    Stream *stream = of(s);
    int pageable = target.kind == PAGEABLE || source.kind == PAGEABLE;
    if (target.kind == DEVICE && source.kind == DEVICE) count(stream->device, ON_DEVICE, "");
    else if (target.kind == DEVICE) count(stream->device, pageable ? PAGEABLE_TO_DEVICE : PINNED_TO_DEVICE, "");
    else if (source.kind == DEVICE) count(stream->device, pageable ? PAGEABLE_TO_HOST : PINNED_TO_HOST, "");
    if (waits) count(stream->device, SYNC_COPIES, "");
    if (stream->capturing)
        return pageable && target.kind != source.kind ? illegal("a copy of pageable memory in a capture", cudaErrorStreamCaptureUnsupported) : 0;
    if (size < MOST_COPIED) memmove(to, from, size);
    return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    NOT_IN_CAPTURE("cudaMemcpy");
    return copy(to, from, size, 1, NULL);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s) { return copy(to, from, size, 0, s); }
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t s) { return copy(to, from, size, 0, s); }
cudaError_t cudaMemcpyToSymbol(const void *to, const void *from, size_t size, size_t at, enum cudaMemcpyKind kind) { return 0; }
cudaError_t cudaMemset(void *p, int value, size_t size) { memset(p, value, size < MOST_SET ? size : MOST_SET); return 0; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t s) { return of(s)->capturing ? 0 : cudaMemset(p, value, size); }

/* ---- kernels: checked, named and counted */

typedef struct { const void *function; const char *name; } Kernel;
static Kernel *kernels;
static int num_kernels, kernel_room;
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;

static const char *name_of(const void *function) {
    for (int i = 0; i < num_kernels; i++)
        if (kernels[i].function == function) return kernels[i].name;
    return "?";
}
static cudaError_t launch(const void *function, dim3 g, dim3 b, size_t shared, cudaStream_t s) {
    size_t threads = (size_t)b.x * b.y * b.z;
    if (!g.x || !g.y || !g.z || !threads || threads > 1024 || shared > 232448) {
        fprintf(stderr, "[fake] %s: grid %u %u %u, block %u %u %u, %zu bytes shared\n", name_of(function), g.x, g.y, g.z, b.x, b.y, b.z, shared);
        return illegal("a launch of a size that no device has", cudaErrorInvalidConfiguration);
    }
    count(of(s)->device, (size_t)s <= 2 || of(s)->capturing ? KERNELS : SIDE_KERNELS, fake_trace >= 2 ? name_of(function) : "");
    return 0;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **h, char *host, char *at, const char *name, int ext, size_t size, int constant, int global) {}
void __cudaRegisterFunction(void **h, const char *function, char *at, const char *name, int limit, void *a, void *b, void *c, void *d, int *w) {
    if (num_kernels == kernel_room) kernels = realloc(kernels, (kernel_room = kernel_room ? 2 * kernel_room : 65536) * sizeof(Kernel));
    kernels[num_kernels++] = (Kernel){function, name};
}
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared, void *s) {
    pushed.grid = g, pushed.block = b, pushed.shared = shared, pushed.stream = s;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *shared, void *s) {
    *g = pushed.grid, *b = pushed.block, *shared = pushed.shared, *(void **)s = pushed.stream;
    return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) { *out = (cudaKernel_t)function; return 0; }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **args, size_t shared, cudaStream_t s) { return launch((void *)k, g, b, shared, s); }
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **args, size_t shared, cudaStream_t s) { return launch(f, g, b, shared, s); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **args, size_t shared, cudaStream_t s) { return launch(f, g, b, shared, s); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
/* Triton launches through the driver (driver.c) */
int fake_driver_launch(cudaStream_t s) { count(of(s)->device, (size_t)s <= 2 || of(s)->capturing ? KERNELS : SIDE_KERNELS, "triton"); return 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *f) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024, out->numRegs = 64, out->binaryVersion = out->ptxVersion = 90, out->maxDynamicSharedSizeBytes = 232448;
    return 0;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute what, int value) { return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { *n = 2; return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) { *n = 2; return 0; }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { static char somewhere[1 << 20]; *p = somewhere; return 0; }

/* ---- devices: two H100s, as far as they are asked about */

cudaError_t cudaGetDeviceCount(int *n) { *n = DEVICES; return 0; }
cudaError_t cudaGetDevice(int *out) { *out = device; return 0; }
cudaError_t cudaSetDevice(int n) { return n >= DEVICES ? fail(cudaErrorInvalidDevice) : (device = n < 0 ? 0 : n, 0); }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = fake_peers && a != b; return 0; }
cudaError_t cudaDeviceEnablePeerAccess(int n, unsigned flags) { return fake_peers ? 0 : fail(cudaErrorPeerAccessUnsupported); }
cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int n) { snprintf(out, size, "0000:0%d:00.0", n + 1); return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *out, int n) { *out = (cudaMemPool_t)8; return 0; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr what, void *value) { return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int n) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3 (fake)");
    p->totalGlobalMem = MEMORY, p->major = 9, p->multiProcessorCount = 132, p->warpSize = 32, p->unifiedAddressing = 1;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->l2CacheSize = 50 << 20, p->textureAlignment = 512;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32, p->pciBusID = n + 1;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int n) {
    switch (what) {
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: *value = 1;
    }
    return 0;
}
cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = 0; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t error) { return "fakeError"; }
const char *cudaGetErrorString(cudaError_t error) { static __thread char text[48]; snprintf(text, 48, "fake CUDA error %d", error); return text; }
static CUresult is_active(CUdevice n, unsigned *flags, int *active) { if (flags) *flags = 0; *active = 1; return 0; }
static CUresult nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **p, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
    *p = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)nothing : (void *)is_active;
    if (found) *found = cudaDriverEntryPointSuccess;
    return 0;
}

/* ---- cuBLAS: products are kernels */

typedef struct { char name[16]; } Handle;
static __thread cudaStream_t blas_stream;
static int product(void) { return launch(NULL, (dim3){1, 1, 1}, (dim3){1, 1, 1}, 0, blas_stream); }
#define MAKES(name) int name(void **out) { *out = calloc(1, 256); return 0; }
#define DROPS(name) int name(void *handle) { free(handle); return 0; }
#define IGNORES(name) int name() { return 0; }
#define MULTIPLIES(name) int name() { return product(); }
MAKES(cublasCreate_v2) DROPS(cublasDestroy_v2)
int cublasSetStream_v2(void *handle, cudaStream_t s) { blas_stream = s; return 0; }
IGNORES(cublasSetWorkspace_v2) IGNORES(cublasSetMathMode) IGNORES(cublasSetPointerMode_v2)
int cublasGetMathMode(void *handle, int *out) { *out = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *out) { *out = 0; return 0; }
MULTIPLIES(cublasGemmEx) MULTIPLIES(cublasSgemm_v2) MULTIPLIES(cublasSgemmEx) MULTIPLIES(cublasDgemm_v2) MULTIPLIES(cublasSgemv_v2)
MULTIPLIES(cublasGemmStridedBatchedEx) MULTIPLIES(cublasSgemmStridedBatched)
MAKES(cublasLtMatmulDescCreate) DROPS(cublasLtMatmulDescDestroy) IGNORES(cublasLtMatmulDescSetAttribute)
MAKES(cublasLtMatmulPreferenceCreate) DROPS(cublasLtMatmulPreferenceDestroy) IGNORES(cublasLtMatmulPreferenceSetAttribute)
MAKES(cublasLtMatrixLayoutCreate) DROPS(cublasLtMatrixLayoutDestroy) IGNORES(cublasLtMatrixLayoutSetAttribute)
MULTIPLIES(cublasLtMatmul)
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, void *results, int *found) {
    memset(results, 0, 96);
    *found = 1;
    return 0;
}
