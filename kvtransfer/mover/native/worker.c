/* A thread that carries out moves one after the other and never needs the interpreter: a busy one would make
 * every hand-over wait. `event_fd` becomes readable when some are done.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
#include "move.h"

struct worker {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t is_wanted;
    struct move *first, *last;
    int event_fd, is_stopping;
};

/* The next move; NULL once there is none and none will come. */
static struct move *next_move(struct worker *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->first && !w->is_stopping) pthread_cond_wait(&w->is_wanted, &w->lock);
    struct move *m = w->first;
    if (m) w->first = m->next;
    pthread_mutex_unlock(&w->lock);
    return m;
}

static void *work(void *argument)
{
    struct worker *w = argument;
    struct move *m;
    while ((m = next_move(w))) {
        uint64_t one = 1;
        m->problem = kt_move(m);
        __atomic_store_n(&m->is_done, 1, __ATOMIC_RELEASE); /* from here on its memory is the caller's again */
        ssize_t written = write(w->event_fd, &one, sizeof one);
        (void)written; /* fails only where the counter is at its limit: then the reader is notified anyway */
    }
    return NULL;
}

/* NULL when no thread can be had. Signals stay with the interpreter's threads. */
struct worker *kt_worker_start(int event_fd)
{
    sigset_t all, before;
    struct worker *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->event_fd = event_fd;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->is_wanted, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int problem = pthread_create(&w->thread, NULL, work, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!problem) return w;
    free(w);
    return NULL;
}

void kt_worker_submit(struct worker *w, struct move *m)
{
    m->next = NULL;
    pthread_mutex_lock(&w->lock);
    if (w->first) w->last->next = m;
    else w->first = m;
    w->last = m;
    pthread_cond_signal(&w->is_wanted);
    pthread_mutex_unlock(&w->lock);
}

/* Ends once everything that was submitted is done. */
void kt_worker_stop(struct worker *w)
{
    pthread_mutex_lock(&w->lock);
    w->is_stopping = 1;
    pthread_cond_signal(&w->is_wanted);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->is_wanted);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
