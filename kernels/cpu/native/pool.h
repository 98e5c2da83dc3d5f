/* A small thread pool that sleeps when idle. See pool.c. */
#ifndef KVRELAY_POOL_H
#define KVRELAY_POOL_H

typedef struct pool pool;
typedef void (*pool_task)(void *job, long index);

/* Run task(job, 0..count-1), each once, on the caller and the awake threads of the pool. Returns when all are done. */
void pool_run(pool *p, pool_task task, void *job, long count);
int pool_threads(const pool *p);
/* Scratch memory of the pool (slot 0..3) or of the calling thread; grows, 64-byte aligned, contents undefined. */
void *pool_scratch(pool *p, int slot, unsigned long bytes);
void *thread_scratch(unsigned long bytes);

#endif
