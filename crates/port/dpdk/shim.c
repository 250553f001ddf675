// What the dpdk port needs of DPDK, as plain functions.
//
// DPDK's data path is inline functions on structures that change with the
// version and the configuration. They stay on this side: `src/dpdk/sys`
// sees numbers, bytes and pointers that it only hands back, so it needs no
// generated bindings and fits every DPDK from 22.11 on.

#define _GNU_SOURCE
// For rte_dev_dma_map, which DPDK has had since 19.05.
#define ALLOW_EXPERIMENTAL_API
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rte_bus.h>
#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_epoll.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_interrupts.h>
#include <rte_log.h>
#include <rte_mbuf.h>
#include <rte_memory.h>

#include "handlers.h"
#include "pool.h"

// As in sys/raw.rs.
#define BURST 64
#define DRIVER_BYTES 32

// What is sent goes through one ring, so that it stays in order.
enum { TRANSMIT_QUEUE = 0 };

// Buffers of a device that wants memory of DPDK's own: its rings, and what is
// on its way.
#define COPIES 8192

// What is known of a frame's transport checksum, or is left to the device.
enum {
    CHECKSUM_UNKNOWN = 0,
    CHECKSUM_VERIFIED = 1,
    CHECKSUM_UDP = 2,
    CHECKSUM_TCP = 3,
};

// One frame of a burst.
struct tg_packet {
    uint8_t *data;
    uint32_t len;
    uint8_t checksum;
    // Where to sum, for CHECKSUM_UDP and CHECKSUM_TCP.
    uint8_t is_v6;
    uint8_t link_bytes;
    uint8_t network_bytes;
    // Received: the data lie in a frame of the arena, which may be taken.
    uint8_t is_frame;
};

// Frames that have arrived; `mbufs[i]` holds `packets[i]`.
struct tg_burst {
    struct rte_mbuf *mbufs[BURST];
    struct tg_packet packets[BURST];
};

// What a device is and does.
struct tg_device {
    uint16_t port;
    uint16_t mtu;
    uint16_t queues;
    uint16_t queues_max;
    uint8_t mac[6];
    uint8_t receive_checksum;
    uint8_t transmit_checksum;
    uint8_t has_interrupts;
    uint8_t runs;
    // It spreads what arrives over its queues by flow.
    uint8_t has_rss;
    // Its buffers are frames of the arena.
    uint8_t takes_frames;
    uint8_t is_card;
    // It has handlers that free what receiving and sending use, and use what
    // closing frees.
    uint8_t has_handlers;
    char driver[DRIVER_BYTES];
    struct tg_pool pool;
    // How many mbufs were in the pool when its last turn ended.
    uint32_t level;
    struct rte_device *device;
    // What failed, for people.
    const char *step;
};

// What DPDK says, kept for error messages: the end of it.
static pthread_mutex_t said_lock = PTHREAD_MUTEX_INITIALIZER;
static char said[1024];
static size_t said_bytes;

static ssize_t keep(void *cookie, const char *text, size_t bytes)
{
    (void)cookie;
    size_t all = bytes;
    if (bytes > sizeof(said)) {
        text += bytes - sizeof(said);
        bytes = sizeof(said);
    }
    pthread_mutex_lock(&said_lock);
    if (said_bytes + bytes > sizeof(said)) {
        size_t too_many = said_bytes + bytes - sizeof(said);
        memmove(said, said + too_many, said_bytes - too_many);
        said_bytes -= too_many;
    }
    memcpy(said + said_bytes, text, bytes);
    said_bytes += bytes;
    pthread_mutex_unlock(&said_lock);
    return (ssize_t)all;
}

// Keeps what DPDK says from now on instead of printing it.
void tg_keep_log(void)
{
    cookie_io_functions_t functions = { .write = keep };
    FILE *stream = fopencookie(NULL, "w", functions);
    if (stream != NULL) {
        setvbuf(stream, NULL, _IONBF, 0);
        rte_openlog_stream(stream);
    }
}

// Takes what was kept; at most `room` bytes.
size_t tg_take_log(char *to, size_t room)
{
    pthread_mutex_lock(&said_lock);
    size_t bytes = said_bytes < room ? said_bytes : room;
    memcpy(to, said + said_bytes - bytes, bytes);
    said_bytes = 0;
    pthread_mutex_unlock(&said_lock);
    return bytes;
}

// Returns 0 or an error number. DPDK keeps `argv`.
int tg_start(int argc, char **argv)
{
    return rte_eal_init(argc, argv) < 0 ? rte_errno : tg_pools_start();
}

static int has_port(const uint16_t *ports, unsigned count, uint16_t port)
{
    for (unsigned i = 0; i < count; i++)
        if (ports[i] == port)
            return 1;
    return 0;
}

// Has a driver take the device and finds its port.
static int probe(const char *name, uint16_t *found)
{
    uint16_t before[RTE_MAX_ETHPORTS];
    unsigned count = 0;
    uint16_t port;
    RTE_ETH_FOREACH_DEV(port) before[count++] = port;
    int error = rte_dev_probe(name);
    if (error != 0)
        return -error;
    RTE_ETH_FOREACH_DEV(port) {
        if (!has_port(before, count, port)) {
            *found = port;
            return 0;
        }
    }
    // A device that had a driver before is not an error to DPDK.
    return EEXIST;
}

// The other end of these is memory of this machine: they "verify" checksums
// that nobody has ever summed, and leave ours to a peer who may be a wire.
static int is_paravirtual(const char *driver)
{
    return strstr(driver, "virtio") != NULL || strstr(driver, "vhost") != NULL;
}

// What drivers expect of a buffer behind its headroom.
#define COMMON_ROOM 2048

// Whether the device can have frames of the arena as its buffers: it reads and
// writes wherever a buffer says, and they are large enough. Cards do, and those
// virtual devices that copy. Others put their own memory before the other side,
// or take the mbufs and what lies behind them for the buffers.
static int takes_frames(const struct tg_device *device, const struct tg_memory *memory,
    const char *name)
{
    static const char *const copying[] = { "net_memif", "net_null", "net_pcap", "net_ring",
        "net_tap", "net_vhost" };
    uint32_t room = ((uint32_t)1 << memory->shift) - 1 - RTE_PKTMBUF_HEADROOM;
    if (strstr(name, "zero-copy=yes") != NULL)
        return 0;
    for (unsigned i = 0; i < RTE_DIM(copying); i++)
        if (strcmp(device->driver, copying[i]) == 0)
            return 1;
    return room >= COMMON_ROOM
        && (device->is_card || strcmp(device->driver, "net_af_packet") == 0);
}

// Arenas that DPDK knows, and how many cards use each. Other devices copy, and
// need not reach them; virtio_user cannot even start while there are any, as it
// offers all memory to the other side by descriptors.
static struct {
    uint8_t *base;
    unsigned devices;
} known[RTE_MAX_ETHPORTS];

static int is_virtual(void)
{
    return rte_eal_iova_mode() == RTE_IOVA_VA;
}

static int make_known(const struct tg_memory *memory)
{
    unsigned free_place = 0;
    for (unsigned i = 0; i < RTE_DIM(known); i++) {
        if (known[i].devices > 0 && known[i].base == memory->base) {
            known[i].devices++;
            return 0;
        }
        if (known[i].devices == 0)
            free_place = i;
    }
    size_t pages = memory->bytes / memory->page_bytes;
    rte_iova_t *addresses = calloc(pages, sizeof(*addresses));
    if (addresses == NULL)
        return ENOMEM;
    for (size_t i = 0; i < pages; i++) {
        uint8_t *page = memory->base + i * memory->page_bytes;
        addresses[i] = is_virtual() ? (rte_iova_t)(uintptr_t)page : rte_mem_virt2iova(page);
    }
    int failed = rte_extmem_register(memory->base, memory->bytes, addresses, pages,
        memory->page_bytes);
    free(addresses);
    if (failed)
        return rte_errno;
    known[free_place].base = memory->base;
    known[free_place].devices = 1;
    return 0;
}

static void forget(const struct tg_memory *memory)
{
    for (unsigned i = 0; i < RTE_DIM(known); i++)
        if (known[i].devices > 0 && known[i].base == memory->base && --known[i].devices == 0)
            rte_extmem_unregister(memory->base, memory->bytes);
}

static int cards_have_frames(void)
{
    unsigned devices = 0;
    for (unsigned i = 0; i < RTE_DIM(known); i++)
        devices += known[i].devices;
    return devices > 0;
}

// Lets a card reach the memory, or no longer. Where nothing stands between a
// card and the memory there is nothing to do.
static int map(const struct tg_device *device, const struct tg_memory *memory, int on)
{
    // Virtual addresses are in one piece.
    size_t step = is_virtual() ? memory->bytes : memory->page_bytes;
    for (size_t at = 0; at < memory->bytes; at += step) {
        uint8_t *part = memory->base + at;
        rte_iova_t address = is_virtual() ? (rte_iova_t)(uintptr_t)part : rte_mem_virt2iova(part);
        int failed = on ? rte_dev_dma_map(device->device, part, address, step)
                        : rte_dev_dma_unmap(device->device, part, address, step);
        if (failed && rte_errno != ENOTSUP)
            return rte_errno;
    }
    return 0;
}

static int make_pool(struct tg_device *device, const struct tg_memory *memory, const char *name)
{
    char pool[RTE_MEMPOOL_NAMESIZE];
    int socket = rte_eth_dev_socket_id(device->port);
    // A pool that somebody still has keeps its name.
    static unsigned number;
    snprintf(pool, sizeof(pool), "tidegate%u", number++);
    device->takes_frames = takes_frames(device, memory, name);
    if (!device->takes_frames) {
        device->step = "get memory for its buffers";
        uint32_t frame_bytes = (uint32_t)1 << memory->shift;
        uint16_t data_bytes = RTE_MIN(RTE_MAX(frame_bytes, 2048u), 16384u);
        return tg_pool_of_copies(&device->pool, pool, COPIES, data_bytes, socket);
    }
    device->step = "reach the packet buffers in ordinary memory";
    if (device->is_card && !is_virtual() && memory->page_bytes <= 4096)
        return EFAULT;
    device->step = "register the packet buffers";
    int error = device->is_card ? make_known(memory) : 0;
    if (error != 0)
        return error;
    device->step = "get memory for the descriptions of its buffers";
    error = tg_pool_of_frames(&device->pool, pool, memory, socket);
    if (error != 0) {
        if (device->is_card)
            forget(memory);
        return error;
    }
    device->step = "map the packet buffers";
    return device->is_card ? map(device, memory, 1) : 0;
}

// Starts, stops or closes a device. Where no handlers are in the way that is done
// on this thread, which may be in another network namespace than theirs.
static void change(const struct tg_device *device, void (*work)(void *argument), void *argument)
{
    if (device->has_handlers)
        tg_among_handlers(work, argument);
    else
        work(argument);
}

struct start {
    struct tg_device *device;
    int error;
};

static void do_start(void *argument)
{
    struct start *start = argument;
    start->error = rte_eth_dev_start(start->device->port);
    start->device->runs = start->error == 0;
}

// Starts the device. Returns 0 or a negative error number.
static int start(struct tg_device *device)
{
    struct start start = { .device = device };
    change(device, do_start, &start);
    return start.error;
}

static int configure(struct tg_device *device, const struct rte_eth_dev_info *info,
    uint16_t descriptors, int interrupts)
{
    const uint64_t receive = RTE_ETH_RX_OFFLOAD_UDP_CKSUM | RTE_ETH_RX_OFFLOAD_TCP_CKSUM;
    const uint64_t transmit = RTE_ETH_TX_OFFLOAD_UDP_CKSUM | RTE_ETH_TX_OFFLOAD_TCP_CKSUM;
    const uint64_t flows = RTE_ETH_RSS_IP | RTE_ETH_RSS_UDP | RTE_ETH_RSS_TCP;
    struct rte_eth_conf conf;
    memset(&conf, 0, sizeof(conf));
    if (!is_paravirtual(device->driver)) {
        device->receive_checksum = (info->rx_offload_capa & receive) == receive;
        device->transmit_checksum = (info->tx_offload_capa & transmit) == transmit;
    }
    conf.rxmode.offloads = device->receive_checksum ? receive : 0;
    conf.txmode.offloads = device->transmit_checksum ? transmit : 0;
    conf.intr_conf.rxq = interrupts;
    conf.rx_adv_conf.rss_conf.rss_hf = info->flow_type_rss_offloads & flows;
    device->has_rss = device->queues > 1 && conf.rx_adv_conf.rss_conf.rss_hf != 0;
    if (device->has_rss)
        conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;

    uint16_t port = device->port, receives = descriptors, transmits = descriptors;
    unsigned socket = rte_eth_dev_socket_id(port);
    device->step = "configure it";
    int error = rte_eth_dev_configure(port, device->queues, device->queues, &conf);
    if (error == 0) {
        device->step = "choose the size of its rings";
        error = rte_eth_dev_adjust_nb_rx_tx_desc(port, &receives, &transmits);
    }
    for (uint16_t i = 0; i < device->queues && error == 0; i++) {
        struct rte_eth_rxconf receiving = info->default_rxconf;
        struct rte_eth_txconf transmitting = info->default_txconf;
        receiving.offloads = conf.rxmode.offloads;
        transmitting.offloads = conf.txmode.offloads;
        device->step = "set up a receive ring";
        error = rte_eth_rx_queue_setup(port, i, receives, socket, &receiving,
            device->pool.mempool);
        if (error == 0) {
            device->step = "set up a transmit ring";
            error = rte_eth_tx_queue_setup(port, i, transmits, socket, &transmitting);
        }
    }
    if (error == 0 && strcmp(device->driver, "net_virtio_user") == 0 && cards_have_frames()) {
        device->step = "start it while a card uses packet buffers";
        return ENOTSUP;
    }
    if (error == 0) {
        device->step = "start it";
        error = start(device);
    }
    return -error;
}

static void stop(void *argument)
{
    struct tg_device *device = argument;
    rte_eth_dev_stop(device->port);
    device->runs = 0;
}

// Stops the device and starts it again. Returns 0 or an error number.
int tg_restart(struct tg_device *device)
{
    change(device, stop, device);
    return -start(device);
}

// Whether the device may be received from and sent to, until leave(): it runs,
// and no handler frees what that uses.
static int enter(const struct tg_device *device)
{
    // DPDK takes a burst of a device that is stopped for a mistake.
    return device->runs && (!device->has_handlers || tg_keep_handlers_out(device->port));
}

static void leave(const struct tg_device *device)
{
    if (device->has_handlers)
        tg_let_handlers_in(device->port);
}

// Takes what has arrived and gives it back unseen: a driver may forget what
// waits in its rings. One that makes frames itself never comes to an end.
static void drain(struct tg_device *device)
{
    struct rte_mbuf *mbufs[BURST];
    if (device->has_handlers)
        tg_await_handlers(device->port);
    for (uint16_t queue = 0; queue < device->queues && device->runs; queue++) {
        uint16_t count = 1;
        for (unsigned turns = 0; count > 0 && turns <= COPIES; turns++) {
            count = rte_eth_rx_burst(device->port, queue, mbufs, BURST);
            rte_pktmbuf_free_bulk(mbufs, count);
        }
    }
    leave(device);
}

// Whether it is a card that reaches the frames of the arena.
static int shows_frames(const struct tg_device *device)
{
    return device->is_card && device->takes_frames && device->pool.mempool != NULL;
}

static void stop_and_close(void *argument)
{
    struct tg_device *device = argument;
    if (device->has_handlers)
        tg_unwatch_handlers(device->port);
    stop(device);
    if (shows_frames(device))
        map(device, &device->pool.memory, 0);
    rte_eth_dev_close(device->port);
}

// Lets go of the device. All that is left is the pool, with what came back.
void tg_close(struct tg_device *device)
{
    drain(device);
    change(device, stop_and_close, device);
    if (device->device != NULL)
        rte_dev_remove(device->device);
    if (shows_frames(device))
        forget(&device->pool.memory);
}

// Lets go of the pool, in which there should be `frames` frames of the arena.
// Returns whether nobody has any of its mbufs.
int tg_free_pool(struct tg_device *device, unsigned frames)
{
    return tg_pool_free(&device->pool, device->takes_frames ? frames : COPIES);
}

// Finds a device and makes its pool. Returns 0, or an error number with `step`
// set.
int tg_open(const char *name, const struct tg_memory *memory, struct tg_device *device)
{
    memset(device, 0, sizeof(*device));
    device->step = NULL;
    int error = probe(name, &device->port);
    if (error != 0)
        return error;
    uint16_t port = device->port;
    struct rte_eth_dev_info info;
    device->step = "ask what it can do";
    error = -rte_eth_dev_info_get(port, &info);
    if (error == 0) {
        device->device = info.device;
        device->is_card = strcmp(rte_bus_name(rte_dev_bus(info.device)), "vdev") != 0;
        device->queues_max = RTE_MIN(info.max_rx_queues, info.max_tx_queues);
        snprintf(device->driver, sizeof(device->driver), "%s", info.driver_name);
        // A memif whose other side ends unmaps its rings.
        device->has_handlers = strcmp(device->driver, "net_memif") == 0;
        if (device->has_handlers)
            tg_watch_handlers(port);
        error = make_pool(device, memory, name);
        device->level = error == 0 ? rte_mempool_avail_count(device->pool.mempool) : 0;
    }
    if (error == 0) {
        struct rte_ether_addr mac;
        device->step = "ask for its addresses";
        error = -rte_eth_macaddr_get(port, &mac);
        memcpy(device->mac, mac.addr_bytes, sizeof(device->mac));
        if (error == 0)
            error = -rte_eth_dev_get_mtu(port, &device->mtu);
    }
    if (error != 0) {
        tg_close(device);
        tg_free_pool(device, 0);
    }
    return error;
}

// Whether a driver that interrupts closes the descriptors of its interrupts
// twice, the second time when they may already be another thread's.
static int closes_twice(const char *driver)
{
    return strcmp(driver, "net_virtio_user") == 0;
}

// Starts the device with so many queues in each direction, whose rings have
// `descriptors` places each. Returns 0, or an error number with `step` set; the
// device is to be closed then.
int tg_run(struct tg_device *device, uint16_t queues, uint16_t descriptors)
{
    uint16_t port = device->port;
    struct rte_eth_dev_info info;
    device->step = "ask what it can do";
    int error = -rte_eth_dev_info_get(port, &info);
    if (error != 0)
        return error;
    device->queues = queues;
    int interrupts = !closes_twice(device->driver);
    error = configure(device, &info, descriptors, interrupts);
    device->has_interrupts = error == 0 && interrupts
        && rte_eth_dev_rx_intr_enable(port, 0) == 0;
    if (device->has_interrupts) {
        rte_eth_dev_rx_intr_disable(port, 0);
    } else if (error != 0 && interrupts) {
        rte_eth_dev_stop(port);
        error = configure(device, &info, descriptors, 0);
    }
    // Neighbour discovery comes to groups. A driver that cannot be told so
    // takes them anyway, or everything.
    if (error == 0 && rte_eth_allmulticast_enable(port) != 0)
        rte_eth_promiscuous_enable(port);
    return error;
}

// Whether the link is up.
int tg_link_is_up(const struct tg_device *device)
{
    struct rte_eth_link link;
    memset(&link, 0, sizeof(link));
    return device->runs && rte_eth_link_get_nowait(device->port, &link) == 0
        && link.link_status == RTE_ETH_LINK_UP;
}

// Frames that the device lost: without room in its ring, without a buffer,
// damaged, and those that could not be sent.
void tg_losses(const struct tg_device *device, uint64_t losses[4])
{
    struct rte_eth_stats stats;
    memset(&stats, 0, sizeof(stats));
    rte_eth_stats_get(device->port, &stats);
    losses[0] = stats.imissed;
    losses[1] = stats.rx_nombuf;
    losses[2] = stats.ierrors;
    losses[3] = stats.oerrors;
}

static uint8_t checksum_of(const struct tg_device *device, const struct rte_mbuf *mbuf)
{
    uint64_t l4 = mbuf->ol_flags & RTE_MBUF_F_RX_L4_CKSUM_MASK;
    int good = device->receive_checksum && l4 == RTE_MBUF_F_RX_L4_CKSUM_GOOD;
    return good ? CHECKSUM_VERIFIED : CHECKSUM_UNKNOWN;
}

// Fills the burst with what has arrived at a queue. A frame in pieces that do
// not fit into one buffer has no data.
unsigned tg_receive(struct tg_device *device, uint16_t queue, struct tg_burst *burst)
{
    if (!enter(device))
        return 0;
    // A driver may want buffers for all of a burst, or take nothing. With none
    // at all it may still have some that are filled.
    unsigned most = device->level == 0 ? BURST : RTE_MIN((unsigned)BURST, device->level);
    tg_turn_begin(&device->pool);
    unsigned count = rte_eth_rx_burst(device->port, queue, burst->mbufs, most);
    device->level = tg_turn_end(&device->pool);
    leave(device);
    for (unsigned i = 0; i < count; i++) {
        struct rte_mbuf *mbuf = burst->mbufs[i];
        int whole = mbuf->nb_segs == 1 || rte_pktmbuf_linearize(mbuf) == 0;
        struct tg_packet *packet = &burst->packets[i];
        packet->data = whole ? rte_pktmbuf_mtod(mbuf, uint8_t *) : NULL;
        packet->len = mbuf->pkt_len;
        packet->checksum = checksum_of(device, mbuf);
        packet->is_frame = tg_is_frame(&device->pool, mbuf);
        rte_prefetch0(packet->data);
    }
    return count;
}

// Gives received frames back that begin at `from`.
void tg_release(struct tg_burst *burst, unsigned from, unsigned count)
{
    rte_pktmbuf_free_bulk(burst->mbufs + from, count);
}

// Copies frames into buffers of the device. Returns whether there were so many.
static int copy_out(struct tg_device *device, const struct tg_packet *packets,
    struct rte_mbuf **mbufs, unsigned count)
{
    if (rte_pktmbuf_alloc_bulk(device->pool.mempool, mbufs, count) != 0)
        return 0;
    for (unsigned i = 0; i < count; i++)
        memcpy(rte_pktmbuf_mtod(mbufs[i], void *), packets[i].data, packets[i].len);
    return 1;
}

// Returns whether there is anything for the device to sum.
static int describe(const struct tg_packet *packets, struct rte_mbuf **mbufs, unsigned count)
{
    int asks = 0;
    for (unsigned i = 0; i < count; i++) {
        struct rte_mbuf *mbuf = mbufs[i];
        const struct tg_packet *packet = &packets[i];
        mbuf->pkt_len = packet->len;
        mbuf->data_len = (uint16_t)packet->len;
        mbuf->ol_flags &= RTE_MBUF_F_EXTERNAL;
        if (packet->checksum == CHECKSUM_UNKNOWN)
            continue;
        asks = 1;
        mbuf->tx_offload = 0;
        mbuf->l2_len = packet->link_bytes;
        mbuf->l3_len = packet->network_bytes;
        mbuf->ol_flags |= packet->is_v6 ? RTE_MBUF_F_TX_IPV6
                                        : RTE_MBUF_F_TX_IPV4;
        mbuf->ol_flags |= packet->checksum == CHECKSUM_TCP ? RTE_MBUF_F_TX_TCP_CKSUM
                                                           : RTE_MBUF_F_TX_UDP_CKSUM;
    }
    return asks;
}

// Sends frames. Returns how many the device took, from the first on: those
// belong to the pool from now on, if it is one of frames. Tells whether it will
// never take the next one.
unsigned tg_transmit(struct tg_device *device, const struct tg_packet *packets, unsigned count,
    uint8_t *refuses_next)
{
    struct rte_mbuf *mbufs[BURST];
    *refuses_next = 0;
    if (!enter(device))
        return 0;
    tg_turn_begin(&device->pool);
    unsigned sent = 0;
    if (device->takes_frames) {
        for (unsigned i = 0; i < count; i++)
            mbufs[i] = tg_mbuf_at(&device->pool, packets[i].data);
    } else if (!copy_out(device, packets, mbufs, count)) {
        // The driver looks for what it has sent when it is called.
        rte_eth_tx_done_cleanup(device->port, TRANSMIT_QUEUE, 0);
        count = 0;
    }
    if (count > 0) {
        unsigned ready = count;
        if (describe(packets, mbufs, count))
            ready = rte_eth_tx_prepare(device->port, TRANSMIT_QUEUE, mbufs, count);
        sent = rte_eth_tx_burst(device->port, TRANSMIT_QUEUE, mbufs, ready);
        *refuses_next = sent == ready && ready < count;
        if (!device->takes_frames)
            rte_pktmbuf_free_bulk(mbufs + sent, count - sent);
    }
    device->level = tg_turn_end(&device->pool);
    leave(device);
    return sent;
}

// Has interrupts of the device make `epoll` readable. Returns 0 or an error.
int tg_watch(const struct tg_device *device, int epoll)
{
    int error = 0;
    for (uint16_t i = 0; i < device->queues && error == 0; i++)
        error = -rte_eth_dev_rx_intr_ctl_q(device->port, i, epoll, RTE_INTR_EVENT_ADD, NULL);
    return error;
}

// Turns the device's interrupts on or off. Returns 0 or an error.
int tg_set_interrupts(const struct tg_device *device, int on)
{
    int error = 0;
    for (uint16_t i = 0; i < device->queues && error == 0; i++)
        error = on ? -rte_eth_dev_rx_intr_enable(device->port, i)
                   : -rte_eth_dev_rx_intr_disable(device->port, i);
    return error;
}

// Takes note of interrupts that have come, so that `epoll` is not readable.
void tg_take_interrupts(int epoll)
{
    struct rte_epoll_event event;
    while (rte_epoll_wait(epoll, &event, 1, 0) > 0) {
    }
}
