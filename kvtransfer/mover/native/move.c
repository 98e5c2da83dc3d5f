/* One read: scattered rows copied and hashed as they land.
 *
 * Bytes land in the order of the rows; chunk i is the i-th pieces_per_chunk * piece_bytes of them. In a large read a
 * chunk of one piece is hashed in the pass that copies it, from the registers that are stored: beside other work that
 * takes the caches, 64 MiB in 32 KiB chunks took 10 ms instead of 13; on a quiet machine 9 ms either way, and 8
 * without hashes (an Intel Xeon). Otherwise it is hashed where it landed,
 * in the target, while the caches still hold it. Called without the interpreter's lock; another thread may look at
 * `landed`.
 */
#define _GNU_SOURCE
#include <time.h>
#include "vector.h"
#include "move.h"
#include "xxh3.h"

#define NEAR (64 << 10)      /* bytes copied before they are hashed: the second-level cache keeps them */
#define TICK (1 << 20)       /* bytes copied between two counts where nothing is hashed */
#define STREAM (1 << 20)     /* reads from here on go past the caches, but for what is hashed there */

struct span {
    uint64_t from, to;
    int64_t size;
};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The next row's rest, at most `limit` bytes of it; the cursor is then behind it. */
INLINE struct span take(struct move *m, int64_t limit)
{
    int64_t left = m->num_bytes[m->row] - m->inside, size = smaller(left, limit);
    struct span span = {
        m->source + m->source_offset[m->row] + m->inside,
        m->target + m->target_offset[m->row] + m->inside,
        size,
    };
    m->inside += size;
    if (size == left) {
        m->inside = 0;
        m->row++;
    }
    return span;
}

INLINE void place(uint8_t *to, const uint8_t *from, int64_t size, int is_streamed)
{
#if HAS_STREAM
    if (is_streamed && size >= 1024) {
        int64_t head = -(uintptr_t)to & (WIDTH - 1), i = head;
        memcpy(to, from, head);
        for (; i + 4 * WIDTH <= size; i += 4 * WIDTH) {
            u64v a = load(from + i), b = load(from + i + WIDTH);
            u64v c = load(from + i + 2 * WIDTH), d = load(from + i + 3 * WIDTH);
            stream(to + i, a);
            stream(to + i + WIDTH, b);
            stream(to + i + 2 * WIDTH, c);
            stream(to + i + 3 * WIDTH, d);
        }
        memcpy(to + i, from + i, size - i);
        return;
    }
#endif
    memcpy(to, from, size);
}

static void copy_rows(struct move *m, int64_t size, int is_streamed)
{
    while (size > 0) {
        struct span span = take(m, size);
        place((uint8_t *)span.to, (const uint8_t *)span.from, span.size, is_streamed);
        size -= span.size;
    }
#if HAS_STREAM
    if (is_streamed) stream_fence();
#endif
}

INLINE int64_t chunk_bytes(const struct move *m) { return m->pieces_per_chunk * m->piece_bytes; }
INLINE int needs_hash(const struct move *m, int64_t chunk) { return !m->is_checked || m->is_checked[chunk]; }

static int is_any_checked(const struct move *m, int64_t first, int64_t stop)
{
    for (int64_t i = first; i < stop; i++)
        if (needs_hash(m, i)) return 1;
    return 0;
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Hash chunks up to `stop`, which lie in the target. */
static void hash_to(struct move *m, int64_t stop)
{
    int64_t began = now_ns(), each = m->pieces_per_chunk;
    const uint8_t *base = (const uint8_t *)m->target;
    for (int64_t i = m->hashed; i < stop; i++) {
        if (!needs_hash(m, i)) continue;
        const int64_t *pieces = m->pieces + i * each;
        const uint8_t *after = base + pieces[i + 1 < stop ? each : 0];
        m->found[i] = kt_xxh3_chunk(base, pieces, each, m->piece_bytes, m->scratch, after);
    }
    m->hashed = stop;
    m->hash_ns += now_ns() - began;
}

INLINE int is_inside(int64_t offset, int64_t size, int64_t whole)
{
    return offset >= 0 && size >= 0 && size <= whole && offset <= whole - size;
}

/* Copy chunks up to `stop` past the caches, each hashed in the same pass where it is one run at both ends. Chunks have
 * one piece.
 */
static void copy_hashed(struct move *m, int64_t stop)
{
    for (int64_t i = m->hashed, size = m->piece_bytes; i < stop; i++) {
        if (!needs_hash(m, i)) {
            copy_rows(m, size, 1);
            continue;
        }
        struct span span = take(m, size);
        uint8_t *to = (uint8_t *)m->target + m->pieces[i];
        const uint8_t *from = (const uint8_t *)span.from;
        int64_t next = m->row < m->num_rows ? m->source_offset[m->row] + m->inside : 0;
        if (span.size == size && span.to == (uint64_t)to) {
            m->found[i] = kt_xxh3_copy(to, from, size, (const uint8_t *)m->source + next);
            continue;
        }
        memcpy((uint8_t *)span.to, from, span.size);
        copy_rows(m, size - span.size, 0);
        m->found[i] = kt_xxh3_long(to, size, to);
    }
    m->hashed = stop;
}

/* The bytes of all rows, or OUT_OF_BOUNDS where a row or a piece lies outside the pools. */
static int64_t measure(const struct move *m)
{
    int64_t total = 0;
    for (int64_t i = 0; i < m->num_rows; i++) {
        if (!is_inside(m->source_offset[i], m->num_bytes[i], m->source_bytes)
            || !is_inside(m->target_offset[i], m->num_bytes[i], m->target_bytes))
            return OUT_OF_BOUNDS;
        if (__builtin_add_overflow(total, m->num_bytes[i], &total)) return OUT_OF_BOUNDS;
    }
    for (int64_t i = 0; i < m->num_chunks * m->pieces_per_chunk; i++)
        if (!is_inside(m->pieces[i], m->piece_bytes, m->target_bytes)) return OUT_OF_BOUNDS;
    if (m->num_chunks && chunk_bytes(m) < XXH3_LONG_FROM) return OUT_OF_BOUNDS;
    return total;
}

/* Without rows: hash what lies in the target already. Returns 0, OUT_OF_BOUNDS or CANCELLED. */
int kt_move(struct move *m)
{
    int64_t total = measure(m), landed = 0;
    if (total < 0) return OUT_OF_BOUNDS;
    if (!m->num_rows) hash_to(m, m->num_chunks);
    int64_t chunk = m->num_chunks ? chunk_bytes(m) : 1;
    int64_t step = m->num_chunks ? NEAR : TICK;
    step = step < chunk ? chunk : step - step % chunk;
    while (landed < total) {
        if (__atomic_load_n(&m->is_cancelled, __ATOMIC_RELAXED)) return CANCELLED;
        int64_t size = smaller(step - landed % chunk, total - landed);
        int64_t complete = smaller((landed + size) / chunk, m->num_chunks);
        int is_hashed = is_any_checked(m, m->hashed, complete);
        int is_one_pass = is_hashed && total >= STREAM && m->pieces_per_chunk == 1;
        if (is_one_pass) copy_hashed(m, complete);
        else copy_rows(m, size, total >= STREAM && !is_hashed);
        landed += size;
        __atomic_store_n(m->landed, landed, __ATOMIC_RELEASE);
        if (is_hashed && !is_one_pass) hash_to(m, complete);
        m->hashed = complete;
    }
    return 0;
}
