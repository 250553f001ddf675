// Mbuf pools: pools over the frames of an arena, and ordinary pools for devices that need
// DPDK's own memory.

#ifndef TIDEGATE_POOL_H
#define TIDEGATE_POOL_H

#include <stdint.h>

#include <rte_mbuf.h>
#include <rte_mempool.h>

// Memory of an arena: `frames` frames of `1 << shift` bytes each.
struct dpdk_memory {
    uint8_t *base;
    size_t bytes;
    uint32_t frames;
    uint32_t shift;
    // Page size. A page is contiguous in physical memory too.
    size_t page_bytes;
};

// A pool. In a pool over arena frames, mbuf number i describes frame number i as long as both
// exist; the pool contains only frames that were lent to it.
struct dpdk_pool {
    struct rte_mempool *mempool;
    // First of `frames` mbufs; NULL in a pool of DPDK's own memory.
    uint8_t *mbufs;
    struct dpdk_memory memory;
    // lcore number that DPDK sees for a thread during its turn.
    unsigned lcore;
};

// Distance between mbufs of a pool over frames, in bytes. The page size is a multiple.
#define MBUF_STRIDE (4 * RTE_CACHE_LINE_SIZE)

// Registers the mempool operations with DPDK. Returns 0 or an error number.
int dpdk_pools_start(void);

// Creates an empty pool over the frames of an arena; a turn takes up to `burst` mbufs.
// Returns 0 or an error number.
int dpdk_pool_of_frames(struct dpdk_pool *pool, const char *name, const struct dpdk_memory *memory,
    unsigned burst, int socket);

// Creates a full pool of `mbufs` mbufs with `data_bytes` after the headroom; a turn takes up to
// `burst` mbufs. Returns 0 or an error number.
int dpdk_pool_of_copies(struct dpdk_pool *pool, const char *name, unsigned mbufs, uint16_t data_bytes,
    unsigned burst, int socket);

// A TSO frame is passed to the device as a chain: a copy of its headers, then pieces of the
// payload in place, each at most as long as all NICs accept. Each element needs an mbuf of this
// pool, which has more mbufs than any ring has descriptors.
#define HEADERS_BYTES 256
#define PIECE_BYTES 8192
#define LINKS 4096
#define LINKS_OF_FRAME (1 + 65536 / PIECE_BYTES)

// Creates a full pool of mbufs for chains. Returns NULL with rte_errno set.
struct rte_mempool *dpdk_pool_of_links(const char *name, int socket);

// Builds a chain for a frame of `bytes` bytes, of which `headers` are copied. Returns NULL if
// there are not enough mbufs. The chain holds references to the frame. Freeing the mbuf of the
// frame drops its own reference; with the last reference the frame returns to its pool. Until
// then the flags of that mbuf must not change.
struct rte_mbuf *dpdk_chain(struct rte_mempool *links, struct rte_mbuf *frame, uint32_t bytes,
    uint16_t headers);

// Frees the pool if all `mbufs` mbufs that it was given are in it. Otherwise mbufs would later
// return to freed memory: then the pool is kept for good and the result is 0.
int dpdk_pool_free(struct dpdk_pool *pool, unsigned mbufs);

// Begins a turn: until dpdk_turn_end the calling thread allocates and frees mbufs without a lock.
// No other thread may have a turn with this pool meanwhile; other threads may free mbufs.
void dpdk_turn_begin(struct dpdk_pool *pool);
// Ends the turn. Returns the number of mbufs in the pool.
unsigned dpdk_turn_end(struct dpdk_pool *pool);

// True if the mbuf is a frame of the arena with pool `frames`, in a single segment, and has no
// other reference.
static inline int dpdk_is_frame(const struct rte_mempool *frames, const struct rte_mbuf *mbuf)
{
    return mbuf->pool == frames && mbuf->nb_segs == 1 && rte_mbuf_refcnt_read(mbuf) == 1;
}

static inline struct rte_mbuf *dpdk_mbuf_of(const struct dpdk_pool *pool, size_t frame)
{
    return (struct rte_mbuf *)(pool->mbufs + frame * MBUF_STRIDE);
}

// Mbuf of the frame that `data` points into; sets the start of its data there.
static inline struct rte_mbuf *dpdk_mbuf_at(const struct dpdk_pool *pool, const uint8_t *data)
{
    size_t at = (size_t)(data - pool->memory.base);
    struct rte_mbuf *mbuf = dpdk_mbuf_of(pool, at >> pool->memory.shift);
    mbuf->data_off = (uint16_t)(at & (((size_t)1 << pool->memory.shift) - 1));
    return mbuf;
}

#endif
