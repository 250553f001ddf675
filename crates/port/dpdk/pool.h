// Pools of mbufs: those whose data are the frames of an arena, and ordinary
// ones for devices that want memory of DPDK's own.

#ifndef TIDEGATE_POOL_H
#define TIDEGATE_POOL_H

#include <stdint.h>

#include <rte_mbuf.h>
#include <rte_mempool.h>

// The memory of an arena: `frames` pieces of `1 << shift` bytes each.
struct tg_memory {
    uint8_t *base;
    size_t bytes;
    uint32_t frames;
    uint32_t shift;
    // Of one page, which is in one piece also for a card.
    size_t page_bytes;
};

// A pool. In one of frames, mbuf number i is frame number i as long as both
// exist, and only frames that were lent to the pool are in it.
struct tg_pool {
    struct rte_mempool *mempool;
    // The first of as many mbufs as there are frames; NULL in a pool of DPDK's own
    // memory.
    uint8_t *mbufs;
    struct tg_memory memory;
    // What core a thread is to DPDK while it has a turn.
    unsigned lcore;
};

// From one mbuf of a pool of frames to the next. A page is a multiple of it.
#define MBUF_STRIDE (4 * RTE_CACHE_LINE_SIZE)

// Makes the pools below known to DPDK. Returns 0 or an error number.
int tg_pools_start(void);

// Makes an empty pool for the frames of an arena, of which a turn takes up to `burst`.
// Returns 0 or an error number.
int tg_pool_of_frames(struct tg_pool *pool, const char *name, const struct tg_memory *memory,
    unsigned burst, int socket);

// Makes a full pool of `mbufs` with room for `data_bytes` behind the headroom, of which a
// turn takes up to `burst`.
int tg_pool_of_copies(struct tg_pool *pool, const char *name, unsigned mbufs, uint16_t data_bytes,
    unsigned burst, int socket);

// A frame that the device is to cut is given to it as a chain: a copy of its headers,
// and pieces of the rest where they lie, as long as all cards take them. Each has an
// mbuf of a pool of these, of which there are more than any ring has places.
#define HEADERS_BYTES 256
#define PIECE_BYTES 8192
#define LINKS 4096
#define LINKS_OF_FRAME (1 + 65536 / PIECE_BYTES)

// Makes a full pool of mbufs for chains. Returns NULL with rte_errno set.
struct rte_mempool *tg_pool_of_links(const char *name, int socket);

// Makes a chain of a frame of `bytes` bytes, of which `headers` are copied; NULL if there
// are not enough mbufs. The chain has shares in the frame: who frees the mbuf of the frame
// gives its own away, and with the last share the frame is in its pool. Until then the
// flags of that mbuf must stay as they are.
struct rte_mbuf *tg_chain(struct rte_mempool *links, struct rte_mbuf *frame, uint32_t bytes,
    uint16_t headers);

// Lets go of the pool if all of the `mbufs` that it was given are in it. Others
// would come back to memory that is not there: then it stays for good, and the
// result is 0.
int tg_pool_free(struct tg_pool *pool, unsigned mbufs);

// From here to tg_turn_end the calling thread takes and gives back without a lock.
// No other thread may have a turn with this pool meanwhile; they may give back.
void tg_turn_begin(struct tg_pool *pool);
// Returns how many mbufs are in the pool.
unsigned tg_turn_end(struct tg_pool *pool);

// Whether the mbuf is a frame of an arena, whose pool is `frames`, all of it in one
// piece, and nobody else reads it.
static inline int tg_is_frame(const struct rte_mempool *frames, const struct rte_mbuf *mbuf)
{
    return mbuf->pool == frames && mbuf->nb_segs == 1 && rte_mbuf_refcnt_read(mbuf) == 1;
}

static inline struct rte_mbuf *tg_mbuf_of(const struct tg_pool *pool, size_t frame)
{
    return (struct rte_mbuf *)(pool->mbufs + frame * MBUF_STRIDE);
}

// The mbuf whose frame `data` points into; its data begins there.
static inline struct rte_mbuf *tg_mbuf_at(const struct tg_pool *pool, const uint8_t *data)
{
    size_t at = (size_t)(data - pool->memory.base);
    struct rte_mbuf *mbuf = tg_mbuf_of(pool, at >> pool->memory.shift);
    mbuf->data_off = (uint16_t)(at & (((size_t)1 << pool->memory.shift) - 1));
    return mbuf;
}

#endif
