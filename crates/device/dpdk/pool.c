// See pool.h.

#include "pool.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rte_errno.h>
#include <rte_malloc.h>
#include <rte_memory.h>
#include <rte_spinlock.h>

// LIFO: the most recently freed mbufs are allocated first, while still in cache. During a turn
// the driver uses a DPDK mempool cache in front of this stack, through its own inline functions
// and without a lock. Overflow of that cache, and mbufs freed outside of a turn, go to the
// stack.
struct stack {
    rte_spinlock_t lock;
    unsigned count;
    unsigned size;
    void *objects[];
};

#define OPS "tidegate"

// Drivers find a pool's cache by the lcore number of their thread. During a turn the thread uses
// the pool's lcore number, which EAL assigns to no thread. So the cache belongs to the turn,
// on any thread.
#define POOL_LCORES (RTE_MAX_LCORE / 2)

// lcore number of this thread outside of turns.
static __thread unsigned own_lcore;

static int stack_alloc(struct rte_mempool *mempool)
{
    size_t bytes = sizeof(struct stack) + mempool->size * sizeof(void *);
    struct stack *stack = calloc(1, bytes);
    if (stack == NULL)
        return -ENOMEM;
    rte_spinlock_init(&stack->lock);
    stack->size = mempool->size;
    mempool->pool_data = stack;
    return 0;
}

static void stack_free(struct rte_mempool *mempool)
{
    free(mempool->pool_data);
}

static int stack_enqueue(struct rte_mempool *mempool, void *const *objects, unsigned count)
{
    struct stack *stack = mempool->pool_data;
    rte_spinlock_lock(&stack->lock);
    // An overflow can only come from a driver that frees an mbuf twice.
    int fits = count <= stack->size - stack->count;
    if (fits) {
        memcpy(stack->objects + stack->count, objects, count * sizeof(*objects));
        __atomic_store_n(&stack->count, stack->count + count, __ATOMIC_RELAXED);
    }
    rte_spinlock_unlock(&stack->lock);
    return fits ? 0 : -ENOBUFS;
}

static int stack_dequeue(struct rte_mempool *mempool, void **objects, unsigned count)
{
    struct stack *stack = mempool->pool_data;
    rte_spinlock_lock(&stack->lock);
    int there = count <= stack->count;
    if (there) {
        unsigned left = stack->count;
        for (unsigned i = 0; i < count; i++)
            objects[i] = stack->objects[--left];
        __atomic_store_n(&stack->count, left, __ATOMIC_RELAXED);
    }
    rte_spinlock_unlock(&stack->lock);
    return there ? 0 : -ENOBUFS;
}

static unsigned stack_count(const struct rte_mempool *mempool)
{
    const struct stack *stack = mempool->pool_data;
    return stack->count;
}

int dpdk_pools_start(void)
{
    static const struct rte_mempool_ops ops = {
        .name = OPS,
        .alloc = stack_alloc,
        .free = stack_free,
        .enqueue = stack_enqueue,
        .dequeue = stack_dequeue,
        .get_count = stack_count,
    };
    int index = rte_mempool_register_ops(&ops);
    return index < 0 ? -index : 0;
}

// Cache used during a turn; NULL for a pool with few mbufs.
static struct rte_mempool_cache *cache_of(const struct dpdk_pool *pool)
{
    return rte_mempool_default_cache(pool->mempool, pool->lcore);
}

// Number of mbufs moved between the stack and the cache of a turn at once: about one burst. Few
// mbufs stay in the cache, because device setup has no turn and allocates from the stack.
static unsigned cache_size(unsigned mbufs, unsigned burst)
{
    return RTE_MIN(mbufs / 2, burst);
}

// Assigns the pool its lcore number and disables the caches of all other lcores. Otherwise an
// EAL lcore thread would keep mbufs in its own cache, and the turn of another pool would use
// the cache as its own.
static void leave_one_cache(struct dpdk_pool *pool)
{
    static atomic_uint number;
    pool->lcore = RTE_MAX_LCORE - 1 - atomic_fetch_add(&number, 1) % POOL_LCORES;
    for (unsigned lcore = 0; lcore < RTE_MAX_LCORE; lcore++) {
        struct rte_mempool_cache *cache = rte_mempool_default_cache(pool->mempool, lcore);
        if (cache != NULL && lcore != pool->lcore)
            cache->size = cache->flushthresh = 0;
    }
}

// Number of mbufs in the pool. For the thread that may have a turn.
static unsigned level(const struct dpdk_pool *pool)
{
    const struct stack *stack = pool->mempool->pool_data;
    const struct rte_mempool_cache *cache = cache_of(pool);
    // Mbufs freed concurrently by other threads are counted next time.
    unsigned in_stack = __atomic_load_n(&stack->count, __ATOMIC_RELAXED);
    return in_stack + (cache != NULL ? cache->len : 0);
}

void dpdk_turn_begin(struct dpdk_pool *pool)
{
    own_lcore = RTE_PER_LCORE(_lcore_id);
    RTE_PER_LCORE(_lcore_id) = pool->lcore;
}

unsigned dpdk_turn_end(struct dpdk_pool *pool)
{
    RTE_PER_LCORE(_lcore_id) = own_lcore;
    return level(pool);
}

// Called when the last reference to the frame of an mbuf is dropped.
static void on_unshared(void *data, void *opaque)
{
    struct rte_mbuf *mbuf = opaque;
    (void)data;
    rte_mbuf_ext_refcnt_set(mbuf->shinfo, 1);
    mbuf->ol_flags = 0;
    mbuf->next = NULL;
    mbuf->nb_segs = 1;
    rte_mbuf_raw_free(mbuf);
}

// The reference count of a frame follows its mbuf. DPDK reads that count on every free of an
// mbuf with an external buffer, which costs a cache line. So these mbufs are marked as having
// their buffer directly behind them until references exist: see dpdk_chain.
#define OBJECT_BYTES (sizeof(struct rte_mbuf) + sizeof(struct rte_mbuf_ext_shared_info))

static void init_mbuf(struct dpdk_pool *pool, size_t frame)
{
    struct rte_mbuf *mbuf = dpdk_mbuf_of(pool, frame);
    struct rte_mbuf_ext_shared_info *shared = (void *)(mbuf + 1);
    uint8_t *data = pool->memory.base + (frame << pool->memory.shift);
    int is_virtual = rte_eal_iova_mode() == RTE_IOVA_VA;
    memset(mbuf, 0, sizeof(*mbuf));
    mbuf->buf_addr = data;
    rte_mbuf_iova_set(mbuf, is_virtual ? (rte_iova_t)(uintptr_t)data : rte_mem_virt2iova(data));
    mbuf->buf_len = rte_pktmbuf_data_room_size(pool->mempool);
    mbuf->data_off = RTE_PKTMBUF_HEADROOM;
    mbuf->pool = pool->mempool;
    mbuf->nb_segs = 1;
    mbuf->port = RTE_MBUF_PORT_INVALID;
    mbuf->shinfo = shared;
    rte_mbuf_refcnt_set(mbuf, 1);
    shared->free_cb = on_unshared;
    shared->fcb_opaque = mbuf;
    rte_mbuf_ext_refcnt_set(shared, 1);
}

// Creates the mbufs of an empty pool over frames, at equal distances. Returns 0 or an error
// number.
static int make_mbufs(struct dpdk_pool *pool, int socket)
{
    size_t bytes = (size_t)pool->memory.frames * MBUF_STRIDE;
    uint8_t *objects = rte_zmalloc_socket(NULL, bytes, MBUF_STRIDE, socket);
    if (objects == NULL)
        return ENOMEM;
    pool->mbufs = objects + pool->mempool->header_size;
    int count = rte_mempool_populate_virt(pool->mempool, (char *)objects, bytes,
        sysconf(_SC_PAGESIZE), NULL, NULL);
    if (count < 0)
        return -count;
    if ((unsigned)count != pool->memory.frames)
        return ENOMEM;
    for (size_t frame = 0; frame < pool->memory.frames; frame++)
        init_mbuf(pool, frame);
    // The frames belong to the arena until it lends them.
    ((struct stack *)pool->mempool->pool_data)->count = 0;
    return 0;
}

int dpdk_pool_of_frames(struct dpdk_pool *pool, const char *name, const struct dpdk_memory *memory,
    unsigned burst, int socket)
{
    // An arena keeps the last byte of a frame free, and an mbuf stores its size in 16 bits.
    struct rte_pktmbuf_pool_private about = {
        .mbuf_data_room_size = (uint16_t)(((uint32_t)1 << memory->shift) - 1),
        .flags = RTE_PKTMBUF_POOL_F_PINNED_EXT_BUF,
    };
    pool->memory = *memory;
    pool->mbufs = NULL;
    const unsigned flags = RTE_MEMPOOL_F_NO_SPREAD;
    // DPDK adds a header to each object, and in some builds a trailer.
    unsigned padding = MBUF_STRIDE - rte_mempool_calc_obj_size(OBJECT_BYTES, flags, NULL);
    pool->mempool = rte_mempool_create_empty(name, memory->frames, OBJECT_BYTES + padding,
        cache_size(memory->frames, burst), sizeof(about), socket, flags);
    int error = pool->mempool == NULL ? rte_errno : 0;
    if (error == 0)
        error = -rte_mempool_set_ops_byname(pool->mempool, OPS, NULL);
    if (error == 0) {
        rte_pktmbuf_pool_init(pool->mempool, &about);
        error = make_mbufs(pool, socket);
    }
    if (error == 0)
        leave_one_cache(pool);
    else
        dpdk_pool_free(pool, 0);
    return error;
}

int dpdk_pool_of_copies(struct dpdk_pool *pool, const char *name, unsigned mbufs, uint16_t data_bytes,
    unsigned burst, int socket)
{
    pool->mbufs = NULL;
    pool->mempool = rte_pktmbuf_pool_create_by_ops(name, mbufs, cache_size(mbufs, burst), 0,
        data_bytes + RTE_PKTMBUF_HEADROOM, socket, OPS);
    if (pool->mempool == NULL)
        return rte_errno;
    leave_one_cache(pool);
    return 0;
}

struct rte_mempool *dpdk_pool_of_links(const char *name, int socket)
{
    return rte_pktmbuf_pool_create_by_ops(name, LINKS, 0, 0, RTE_PKTMBUF_HEADROOM + HEADERS_BYTES,
        socket, OPS);
}

struct rte_mbuf *dpdk_chain(struct rte_mempool *links, struct rte_mbuf *frame, uint32_t bytes,
    uint16_t headers)
{
    struct rte_mbuf *head = rte_pktmbuf_alloc(links);
    if (head == NULL)
        return NULL;
    memcpy(rte_pktmbuf_mtod(head, void *), rte_pktmbuf_mtod(frame, void *), headers);
    head->data_len = headers;
    head->pkt_len = bytes;
    // From now on frees read the reference count, until the frame is sent without a chain.
    frame->ol_flags = RTE_MBUF_F_EXTERNAL;
    struct rte_mbuf *last = head;
    for (uint32_t at = headers; at < bytes; at += PIECE_BYTES) {
        struct rte_mbuf *piece = rte_pktmbuf_alloc(links);
        if (piece == NULL) {
            rte_pktmbuf_free(head);
            return NULL;
        }
        rte_pktmbuf_attach(piece, frame);
        piece->data_off = (uint16_t)(frame->data_off + at);
        piece->data_len = (uint16_t)RTE_MIN(bytes - at, (uint32_t)PIECE_BYTES);
        last->next = piece;
        last = piece;
        head->nb_segs++;
    }
    return head;
}

int dpdk_pool_free(struct dpdk_pool *pool, unsigned mbufs)
{
    if (pool->mempool != NULL && pool->mempool->pool_data != NULL
        && rte_mempool_avail_count(pool->mempool) < mbufs)
        return 0;
    uint8_t *objects = pool->mbufs != NULL ? pool->mbufs - pool->mempool->header_size : NULL;
    rte_mempool_free(pool->mempool);
    rte_free(objects);
    pool->mempool = NULL;
    pool->mbufs = NULL;
    return 1;
}

// Adds the mbufs of frames that were just lent to the stack; each frame is given by an address
// inside it. Returns the number of mbufs in the pool.
unsigned dpdk_give(struct dpdk_pool *pool, uint8_t *const *frames, unsigned count)
{
    while (count > 0) {
        void *mbufs[64];
        unsigned some = RTE_MIN(count, (unsigned)RTE_DIM(mbufs));
        for (unsigned i = 0; i < some; i++)
            mbufs[i] = dpdk_mbuf_at(pool, frames[i]);
        rte_mempool_generic_put(pool->mempool, mbufs, some, NULL);
        frames += some;
        count -= some;
    }
    return level(pool);
}

// Removes up to `count` mbufs from the pool and stores the start addresses of their frames.
// Returns the number removed; `left` receives the number of mbufs still in the pool.
unsigned dpdk_take(struct dpdk_pool *pool, uint8_t **frames, unsigned count, unsigned *left)
{
    unsigned taken = 0;
    void *object;
    dpdk_turn_begin(pool);
    while (taken < count && rte_mempool_get(pool->mempool, &object) == 0)
        frames[taken++] = ((struct rte_mbuf *)object)->buf_addr;
    *left = dpdk_turn_end(pool);
    return taken;
}
