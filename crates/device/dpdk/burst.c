// Receive and transmit bursts.

#include "device.h"

#include <string.h>

#include <rte_ethdev.h>
#include <rte_ip.h>
#include <rte_tcp.h>

#include "handlers.h"

// Begins use of the data path, until leave(). Returns true if the device is running and no
// handler frees memory in use.
static int enter(const struct dpdk_queues *queues)
{
    const struct dpdk_device *device = queues->device;
    if (device->announces_bursts && !dpdk_keep_handlers_out(queues->slot))
        return 0;
    // DPDK treats a burst on a stopped device as an error.
    if (likely(atomic_load_explicit(&device->runs, memory_order_acquire)))
        return 1;
    if (device->announces_bursts)
        dpdk_let_handlers_in(queues->slot);
    return 0;
}

static void leave(const struct dpdk_queues *queues)
{
    if (queues->device->announces_bursts)
        dpdk_let_handlers_in(queues->slot);
}

void dpdk_drain(struct dpdk_device *device)
{
    struct rte_mbuf *mbufs[BURST];
    if (!device->is_started)
        return;
    unsigned slot = device->queues[0]->slot;
    if (device->has_handlers)
        dpdk_await_handlers(slot);
    for (uint16_t queue = 0; queue < device->info.queues; queue++) {
        uint16_t count = 1;
        for (unsigned turns = 0; count > 0 && turns <= COPIES; turns++) {
            count = rte_eth_rx_burst(device->port, queue, mbufs, BURST);
            rte_pktmbuf_free_bulk(mbufs, count);
        }
    }
    if (device->has_handlers)
        dpdk_let_handlers_in(slot);
}

// Checksum state of a received frame, from a device that verifies checksums.
static inline uint8_t checksum_of(const struct rte_mbuf *mbuf)
{
    uint64_t l4 = mbuf->ol_flags & RTE_MBUF_F_RX_L4_CKSUM_MASK;
    return l4 == RTE_MBUF_F_RX_L4_CKSUM_GOOD ? CHECKSUM_VERIFIED : CHECKSUM_UNKNOWN;
}

// Prefetch distance, in packets.
#define AHEAD 8

// Fills the burst with the frames received at queue number `queue` of the device. A frame of several
// segments that do not fit one buffer has no data.
unsigned dpdk_receive(struct dpdk_queues *queues, uint16_t queue, struct dpdk_burst *burst)
{
    if (!enter(queues))
        return 0;
    const struct dpdk_device *device = queues->device;
    struct dpdk_pool *pool = &queues->pool;
    // A driver may allocate buffers for the whole burst or receive nothing. With an empty
    // pool, filled buffers may still be waiting.
    unsigned most = device->info.burst;
    if (queues->level > 0)
        most = RTE_MIN(most, queues->level);
    dpdk_turn_begin(pool);
    unsigned count = rte_eth_rx_burst(device->port, queue, burst->mbufs, most);
    queues->level = dpdk_turn_end(pool);
    leave(queues);
    // Constant while packets are written, so the compiler need not reload them for each packet.
    const struct rte_mempool *frames = pool->mbufs != NULL ? pool->mempool : NULL;
    const int verifies = device->info.receive_checksum;
    for (unsigned i = 0; i < count; i++) {
        struct rte_mbuf *mbuf = burst->mbufs[i];
        // Some drivers do not touch the mbufs that they return.
        if (i + AHEAD < count)
            rte_prefetch0(burst->mbufs[i + AHEAD]);
        int whole = likely(mbuf->nb_segs == 1) || rte_pktmbuf_linearize(mbuf) == 0;
        uint8_t *data = whole ? rte_pktmbuf_mtod(mbuf, uint8_t *) : NULL;
        int is_frame = dpdk_is_frame(frames, mbuf);
        uint8_t checksum = verifies ? checksum_of(mbuf) : CHECKSUM_UNKNOWN;
        uint32_t len = mbuf->pkt_len;
        rte_prefetch0(data);
        struct dpdk_packet *packet = &burst->packets[i];
        packet->data = data;
        packet->len = len;
        packet->checksum = checksum;
        packet->is_frame = (uint8_t)is_frame;
    }
    return count;
}

// Frees `count` received frames, beginning at `from`.
void dpdk_release(struct dpdk_burst *burst, unsigned from, unsigned count)
{
    rte_pktmbuf_free_bulk(burst->mbufs + from, count);
}

// Copies frames into buffers of the device. Returns false if there were too few buffers.
static int copy_out(struct dpdk_queues *queues, const struct dpdk_packet *packets,
    struct rte_mbuf **mbufs, unsigned count)
{
    if (rte_pktmbuf_alloc_bulk(queues->pool.mempool, mbufs, count) != 0)
        return 0;
    for (unsigned i = 0; i < count; i++)
        memcpy(rte_pktmbuf_mtod(mbufs[i], void *), packets[i].data, packets[i].len);
    return 1;
}

static void describe_layers(struct rte_mbuf *mbuf, const struct dpdk_packet *packet)
{
    mbuf->tx_offload = 0;
    mbuf->l2_len = packet->link_bytes;
    mbuf->l3_len = packet->network_bytes;
    mbuf->ol_flags |= packet->is_v6 ? RTE_MBUF_F_TX_IPV6
                                    : RTE_MBUF_F_TX_IPV4;
}

// Chain for a TSO frame; NULL if there are not enough mbufs. The checksums in the headers of the
// whole frame apply to no segment. They are reset: the TCP checksum to the pseudo-header sum
// without a length.
static struct rte_mbuf *to_cut(const struct dpdk_queues *queues, const struct dpdk_packet *packet,
    struct rte_mbuf *frame)
{
    uint16_t tcp_at = packet->link_bytes + packet->network_bytes;
    struct rte_mbuf *chain =
        dpdk_chain(queues->links, frame, packet->len, tcp_at + packet->transport_bytes);
    if (chain == NULL)
        return NULL;
    describe_layers(chain, packet);
    chain->l4_len = packet->transport_bytes;
    chain->tso_segsz = packet->segment_bytes;
    chain->ol_flags |= RTE_MBUF_F_TX_TCP_SEG | RTE_MBUF_F_TX_TCP_CKSUM;
    struct rte_tcp_hdr *tcp = rte_pktmbuf_mtod_offset(chain, struct rte_tcp_hdr *, tcp_at);
    void *network = rte_pktmbuf_mtod_offset(chain, void *, packet->link_bytes);
    if (packet->is_v6) {
        tcp->cksum = rte_ipv6_phdr_cksum(network, RTE_MBUF_F_TX_TCP_SEG);
    } else {
        chain->ol_flags |= RTE_MBUF_F_TX_IP_CKSUM;
        ((struct rte_ipv4_hdr *)network)->hdr_checksum = 0;
        tcp->cksum = rte_ipv4_phdr_cksum(network, RTE_MBUF_F_TX_TCP_SEG);
    }
    return chain;
}

// Fills in `count` mbufs, of the frames themselves or of copies. Stops at the first frame without
// enough mbufs and returns the number of frames. TSO frames become chains. `asks` tells whether
// any frame requests a checksum or TSO.
static unsigned describe(const struct dpdk_queues *queues, const struct dpdk_packet *packets,
    struct rte_mbuf **mbufs, unsigned count, int *asks)
{
    // Constant while the mbufs are written.
    const struct dpdk_pool pool = queues->pool;
    const int takes_frames = queues->device->info.takes_frames;
    *asks = 0;
    for (unsigned i = 0; i < count; i++) {
        const struct dpdk_packet *packet = &packets[i];
        struct rte_mbuf *mbuf = takes_frames ? dpdk_mbuf_at(&pool, packet->data) : mbufs[i];
        mbufs[i] = mbuf;
        mbuf->pkt_len = packet->len;
        mbuf->data_len = (uint16_t)packet->len;
        mbuf->ol_flags = 0;
        if (packet->checksum == CHECKSUM_UNKNOWN)
            continue;
        *asks = 1;
        if (packet->checksum == CHECKSUM_TCP_CUT) {
            mbufs[i] = to_cut(queues, packet, mbuf);
            if (mbufs[i] == NULL)
                return i;
            continue;
        }
        describe_layers(mbuf, packet);
        mbuf->ol_flags |= packet->checksum == CHECKSUM_TCP ? RTE_MBUF_F_TX_TCP_CKSUM
                                                           : RTE_MBUF_F_TX_UDP_CKSUM;
    }
    return count;
}

// Settles references after a burst: for accepted TSO frames the chain keeps the only references;
// for the others the chain is freed.
static void settle_chains(struct dpdk_queues *queues, const struct dpdk_packet *packets,
    struct rte_mbuf **mbufs, unsigned sent, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (packets[i].checksum == CHECKSUM_TCP_CUT)
            rte_pktmbuf_free(i < sent ? dpdk_mbuf_at(&queues->pool, packets[i].data) : mbufs[i]);
}

// Transmits frames. Returns the number of frames accepted, from the first on; in a pool over
// frames these belong to the pool afterwards. `refuses_next` is set if the device will never
// accept the next frame.
unsigned dpdk_transmit(struct dpdk_queues *queues, const struct dpdk_packet *packets, unsigned count,
    uint8_t *refuses_next)
{
    struct rte_mbuf *mbufs[BURST];
    *refuses_next = 0;
    if (!enter(queues))
        return 0;
    const struct dpdk_info *info = &queues->device->info;
    uint16_t port = queues->device->port, queue = queues->first;
    dpdk_turn_begin(&queues->pool);
    unsigned sent = 0;
    if (!info->takes_frames && !copy_out(queues, packets, mbufs, count))
        count = 0;
    int asks;
    count = describe(queues, packets, mbufs, count, &asks);
    if (count > 0) {
        unsigned ready = count;
        if (asks)
            ready = rte_eth_tx_prepare(port, queue, mbufs, count);
        sent = rte_eth_tx_burst(port, queue, mbufs, ready);
        *refuses_next = sent == ready && ready < count;
        if (!info->takes_frames)
            rte_pktmbuf_free_bulk(mbufs + sent, count - sent);
        else if (info->cuts && asks)
            settle_chains(queues, packets, mbufs, sent, count);
    } else {
        // No mbufs were free: call the driver, which then reclaims completed transmits.
        rte_eth_tx_done_cleanup(port, queue, 0);
    }
    queues->level = dpdk_turn_end(&queues->pool);
    leave(queues);
    return sent;
}
