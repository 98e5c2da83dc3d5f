/* A pool of threads for one engine: tasks are taken one by one, a late thread delays no other.
 *
 * Each thread begins with its own share of a job's tasks and then helps the others: where tasks are rows, their numbers
 * stay in its core's cache from one job to the next.
 *
 * The caller works too, and waits only for threads that have entered the job. An idle thread spins for
 * some tens of microseconds (the gap between two kernels of one step), then sleeps on a condition.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>
#include "pool.h"

#define SPIN_NS 40000
#define MAX_SLOTS 4

typedef struct {
    _Alignas(64) atomic_long next;
    long end;
} share;

struct pool {
    int num_threads;
    pid_t owner;
    pthread_t *threads;
    pthread_mutex_t run_lock, sleep_lock;
    pthread_cond_t wake;
    pool_task task;
    void *job;
    share *shares;           /* one for each thread, the caller's first */
    atomic_ulong open;       /* generation of the open job, 0 when none */
    atomic_ulong generation; /* of the newest job */
    atomic_int active, sleeping, stop, started;
    void *scratch[MAX_SLOTS];
    unsigned long scratch_bytes[MAX_SLOTS];
};

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void take_tasks(pool *p, int thread)
{
    pool_task task = p->task;
    void *job = p->job;
    for (int i = 0; i < p->num_threads; i++) {
        share *s = &p->shares[(thread + i) % p->num_threads];
        for (long index; (index = atomic_fetch_add(&s->next, 1)) < s->end;) task(job, index);
    }
}

/* Wait until a job newer than `seen` opens or the pool stops; spins first. */
static void await_job(pool *p, unsigned long seen)
{
    long deadline = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load(&p->generation) != seen || atomic_load(&p->stop)) return;
            relax();
        }
    } while (now_ns() < deadline);
    pthread_mutex_lock(&p->sleep_lock);
    atomic_fetch_add(&p->sleeping, 1);
    while (atomic_load(&p->generation) == seen && !atomic_load(&p->stop)) pthread_cond_wait(&p->wake, &p->sleep_lock);
    atomic_fetch_sub(&p->sleeping, 1);
    pthread_mutex_unlock(&p->sleep_lock);
}

static void *work(void *arg)
{
    pool *p = arg;
    const int thread = atomic_fetch_add(&p->started, 1) + 1;
    unsigned long seen = 0;
    while (1) {
        await_job(p, seen);
        if (atomic_load(&p->stop)) return NULL;
        atomic_fetch_add(&p->active, 1);
        unsigned long current = atomic_load(&p->open);
        if (current != 0) {
            seen = current;
            take_tasks(p, thread);
        } else {
            seen = atomic_load(&p->generation);
        }
        atomic_fetch_sub(&p->active, 1);
    }
}

pool *kr_pool_create(int num_threads)
{
    pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->num_threads = num_threads < 1 ? 1 : num_threads;
    p->owner = getpid();
    pthread_mutex_init(&p->run_lock, NULL);
    pthread_mutex_init(&p->sleep_lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->threads = calloc(p->num_threads, sizeof *p->threads);
    if (posix_memalign((void **)&p->shares, 64, p->num_threads * sizeof *p->shares)) abort();
    for (int i = 0; i < p->num_threads - 1; i++)
        if (pthread_create(&p->threads[i], NULL, work, p)) {
            p->num_threads = i + 1;
            break;
        }
    return p;
}

void kr_pool_destroy(pool *p)
{
    if (getpid() == p->owner) {
        pthread_mutex_lock(&p->sleep_lock);
        atomic_store(&p->stop, 1);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->sleep_lock);
        for (int i = 0; i < p->num_threads - 1; i++) pthread_join(p->threads[i], NULL);
    }
    for (int i = 0; i < MAX_SLOTS; i++) free(p->scratch[i]);
    free(p->shares);
    free(p->threads);
    free(p);
}

int pool_threads(const pool *p) { return p->num_threads; }

static void run_shared(pool *p, pool_task task, void *job, long count)
{
    pthread_mutex_lock(&p->run_lock);
    p->task = task;
    p->job = job;
    for (long i = 0; i < p->num_threads; i++) {
        atomic_store_explicit(&p->shares[i].next, count * i / p->num_threads, memory_order_relaxed);
        p->shares[i].end = count * (i + 1) / p->num_threads;
    }
    unsigned long generation = atomic_load(&p->generation) + 1;
    atomic_store(&p->open, generation);
    atomic_store(&p->generation, generation);
    if (atomic_load(&p->sleeping)) {
        pthread_mutex_lock(&p->sleep_lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->sleep_lock);
    }
    take_tasks(p, 0);
    atomic_store(&p->open, 0); /* a thread that enters from now on finds nothing to do */
    for (long spins = 0; atomic_load(&p->active); spins++) {
        if (spins < 20000) relax();
        else sched_yield();
    }
    pthread_mutex_unlock(&p->run_lock);
}

void pool_run(pool *p, pool_task task, void *job, long count)
{
    if (p->num_threads == 1 || count == 1 || getpid() != p->owner) { /* threads do not survive fork */
        for (long i = 0; i < count; i++) task(job, i);
        return;
    }
    run_shared(p, task, job, count);
}

static void *grow(void **memory, unsigned long *size, unsigned long bytes)
{
    if (*size < bytes) {
        free(*memory);
        if (posix_memalign(memory, 64, bytes + bytes / 4)) abort();
        *size = bytes + bytes / 4;
    }
    return *memory;
}

void *pool_scratch(pool *p, int slot, unsigned long bytes)
{
    return grow(&p->scratch[slot], &p->scratch_bytes[slot], bytes);
}

static __thread void *local_memory;
static __thread unsigned long local_bytes;

void *thread_scratch(unsigned long bytes) { return grow(&local_memory, &local_bytes, bytes); }
