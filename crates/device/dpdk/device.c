// Device lifecycle: open, start, stop, close; capabilities and counters.

#include "device.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <rte_bus.h>
#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_epoll.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_interrupts.h>

#include "card_memory.h"
#include "handlers.h"

static int has_port(const uint16_t *ports, unsigned count, uint16_t port)
{
    for (unsigned i = 0; i < count; i++)
        if (ports[i] == port)
            return 1;
    return 0;
}

// Probes the device and finds its port number.
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
    // DPDK reports no error for a device that was probed before.
    return EEXIST;
}

// The peer of these drivers is memory of this machine. They mark checksums as verified that were
// never computed, and leave ours partial to a peer that may forward to a real link.
static int is_paravirtual(const char *driver)
{
    return strstr(driver, "virtio") != NULL || strstr(driver, "vhost") != NULL;
}

// Buffer space after the headroom that drivers expect, in bytes.
#define COMMON_ROOM 2048

// True if the device can use frames of the arena as buffers: it accesses any address given in an
// mbuf, and the frames are large enough. That holds for NICs and for virtual devices that copy.
// Other devices expose their own memory to the peer, or treat the mbufs and the memory behind
// them as the buffers.
static int takes_frames(const struct dpdk_device *device, const struct dpdk_memory *memory,
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

static int make_pool(struct dpdk_device *device, const struct dpdk_memory *memory, const char *name)
{
    char pool[RTE_MEMPOOL_NAMESIZE];
    int socket = rte_eth_dev_socket_id(device->port);
    // A pool with mbufs still in use keeps its name, so each pool gets a new name.
    static unsigned number;
    snprintf(pool, sizeof(pool), "tidegate%u", number++);
    device->takes_frames = takes_frames(device, memory, name);
    if (!device->takes_frames) {
        device->step = "get memory for its buffers";
        uint32_t frame_bytes = (uint32_t)1 << memory->shift;
        uint16_t data_bytes = RTE_MIN(RTE_MAX(frame_bytes, 2048u), 16384u);
        return dpdk_pool_of_copies(
            &device->pool, pool, COPIES, data_bytes, device->burst, socket);
    }
    device->step = "reach the packet buffers in ordinary memory";
    if (device->is_card && !dpdk_is_virtual() && memory->page_bytes <= 4096)
        return EFAULT;
    device->step = "register the packet buffers";
    int error = device->is_card ? dpdk_show_to_cards(memory) : 0;
    if (error != 0)
        return error;
    device->step = "get memory for the descriptions of its buffers";
    error = dpdk_pool_of_frames(&device->pool, pool, memory, device->burst, socket);
    if (error != 0) {
        if (device->is_card)
            dpdk_hide_from_cards(memory);
        return error;
    }
    device->step = "map the packet buffers";
    return device->is_card ? dpdk_let_reach(device->device, memory, 1) : 0;
}

// Runs `work` (start, stop or close). Without handlers to exclude, it runs on this thread, which
// may be in another network namespace than the handler thread.
static void change(const struct dpdk_device *device, void (*work)(void *argument), void *argument)
{
    if (device->has_handlers)
        dpdk_among_handlers(work, argument);
    else
        work(argument);
}

struct start {
    struct dpdk_device *device;
    int error;
};

static void do_start(void *argument)
{
    struct start *start = argument;
    start->error = rte_eth_dev_start(start->device->port);
    start->device->runs = start->error == 0;
}

// Starts the device. Returns 0 or a negative error number.
static int start(struct dpdk_device *device)
{
    struct start start = { .device = device };
    change(device, do_start, &start);
    return start.error;
}

// True if the device supports TSO on frames of the arena, as chains.
static int can_cut(const struct dpdk_device *device, const struct rte_eth_dev_info *info)
{
    const uint64_t needed = RTE_ETH_TX_OFFLOAD_TCP_TSO | RTE_ETH_TX_OFFLOAD_MULTI_SEGS
        | RTE_ETH_TX_OFFLOAD_IPV4_CKSUM;
    uint16_t most = info->tx_desc_lim.nb_seg_max;
    return device->takes_frames && device->transmit_checksum
        && (info->tx_offload_capa & needed) == needed && (most == 0 || most >= LINKS_OF_FRAME);
}

static int make_links(struct dpdk_device *device)
{
    char name[RTE_MEMPOOL_NAMESIZE];
    static unsigned number;
    if (device->links != NULL)
        return 0;
    snprintf(name, sizeof(name), "tidegate_links%u", number++);
    device->links = dpdk_pool_of_links(name, rte_eth_dev_socket_id(device->port));
    return device->links == NULL ? -rte_errno : 0;
}

static int configure(struct dpdk_device *device, const struct rte_eth_dev_info *info,
    uint16_t descriptors, int segmentation, int interrupts)
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
    device->cuts = segmentation && can_cut(device, info);
    if (device->cuts)
        conf.txmode.offloads |= RTE_ETH_TX_OFFLOAD_TCP_TSO | RTE_ETH_TX_OFFLOAD_MULTI_SEGS
            | RTE_ETH_TX_OFFLOAD_IPV4_CKSUM;
    conf.intr_conf.rxq = interrupts;
    conf.rx_adv_conf.rss_conf.rss_hf = info->flow_type_rss_offloads & flows;
    device->has_rss = device->queues > 1 && conf.rx_adv_conf.rss_conf.rss_hf != 0;
    if (device->has_rss)
        conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;

    uint16_t port = device->port, receives = descriptors, transmits = descriptors;
    unsigned socket = rte_eth_dev_socket_id(port);
    device->step = "get memory for chains";
    int error = device->cuts ? make_links(device) : 0;
    if (error == 0) {
        device->step = "configure it";
        error = rte_eth_dev_configure(port, device->queues, device->queues, &conf);
    }
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
    if (error == 0 && strcmp(device->driver, "net_virtio_user") == 0 && dpdk_cards_see_any()) {
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
    struct dpdk_device *device = argument;
    rte_eth_dev_stop(device->port);
    device->runs = 0;
}

// Stops and restarts the device. Returns 0 or an error number.
int dpdk_restart(struct dpdk_device *device)
{
    change(device, stop, device);
    return -start(device);
}

// True if the device is a NIC with DMA access to the frames of the arena.
static int shows_frames(const struct dpdk_device *device)
{
    return device->is_card && device->takes_frames && device->pool.mempool != NULL;
}

static void stop_and_close(void *argument)
{
    struct dpdk_device *device = argument;
    if (device->has_handlers)
        dpdk_unwatch_handlers(device->port);
    stop(device);
    if (shows_frames(device))
        dpdk_let_reach(device->device, &device->pool.memory, 0);
    rte_eth_dev_close(device->port);
}

// Closes the device. Only the pool remains, with the mbufs that were returned.
void dpdk_close(struct dpdk_device *device)
{
    dpdk_drain(device);
    change(device, stop_and_close, device);
    if (device->device != NULL)
        rte_dev_remove(device->device);
    if (shows_frames(device))
        dpdk_hide_from_cards(&device->pool.memory);
}

// Frees the pool, which should contain `frames` frames of the arena. Returns false if any of its
// mbufs is still in use.
int dpdk_free_pool(struct dpdk_device *device, unsigned frames)
{
    if (device->links != NULL && rte_mempool_avail_count(device->links) < LINKS)
        return 0;
    rte_mempool_free(device->links);
    device->links = NULL;
    return dpdk_pool_free(&device->pool, device->takes_frames ? frames : COPIES);
}

// Probes a device and creates its pool. Returns 0, or an error number with `step` set.
int dpdk_open(const char *name, const struct dpdk_memory *memory, struct dpdk_device *device)
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
        device->burst = is_paravirtual(device->driver) ? BURST / 2 : BURST;
        // A memif unmaps its rings when the peer exits.
        device->has_handlers = strcmp(device->driver, "net_memif") == 0;
        if (device->has_handlers)
            dpdk_watch_handlers(port);
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
        dpdk_close(device);
        dpdk_free_pool(device, 0);
    }
    return error;
}

// True if the driver, with interrupts, closes their descriptors twice. By the second time a
// descriptor may belong to another thread.
static int closes_twice(const char *driver)
{
    return strcmp(driver, "net_virtio_user") == 0;
}

// Starts the device with `queues` queues in each direction and rings of `descriptors`
// descriptors each. With `segmentation`, enables TSO if supported. Returns 0, or an error number
// with `step` set; the caller must then close the device.
int dpdk_run(struct dpdk_device *device, uint16_t queues, uint16_t descriptors, int segmentation)
{
    uint16_t port = device->port;
    struct rte_eth_dev_info info;
    device->step = "ask what it can do";
    int error = -rte_eth_dev_info_get(port, &info);
    if (error != 0)
        return error;
    device->queues = queues;
    int interrupts = !closes_twice(device->driver);
    error = configure(device, &info, descriptors, segmentation, interrupts);
    device->has_interrupts = error == 0 && interrupts
        && rte_eth_dev_rx_intr_enable(port, 0) == 0;
    if (device->has_interrupts) {
        rte_eth_dev_rx_intr_disable(port, 0);
    } else if (error != 0 && interrupts) {
        rte_eth_dev_stop(port);
        error = configure(device, &info, descriptors, segmentation, 0);
    }
    // IPv6 neighbour discovery uses multicast. A driver without an all-multicast setting
    // receives multicast frames anyway, or needs promiscuous mode.
    if (error == 0 && rte_eth_allmulticast_enable(port) != 0)
        rte_eth_promiscuous_enable(port);
    return error;
}

// Returns true if the link is up.
int dpdk_link_is_up(const struct dpdk_device *device)
{
    struct rte_eth_link link;
    memset(&link, 0, sizeof(link));
    return device->runs && rte_eth_link_get_nowait(device->port, &link) == 0
        && link.link_status == RTE_ETH_LINK_UP;
}

// Frames lost by the device: dropped on receive ring overflow, dropped for lack of a buffer,
// received with errors, failed to transmit.
void dpdk_losses(const struct dpdk_device *device, uint64_t losses[4])
{
    struct rte_eth_stats stats;
    memset(&stats, 0, sizeof(stats));
    rte_eth_stats_get(device->port, &stats);
    losses[0] = stats.imissed;
    losses[1] = stats.rx_nombuf;
    losses[2] = stats.ierrors;
    losses[3] = stats.oerrors;
}

// Stores the names of the extended statistics, padded with zeros, if `room` suffices for all.
// Returns their number. Returns 0 for vhost: its statistics are in the state of the guest's
// connection, which may end at any time.
unsigned dpdk_statistic_names(const struct dpdk_device *device, char (*names)[STATISTIC_BYTES],
    unsigned room)
{
    _Static_assert(sizeof(struct rte_eth_xstat_name) == STATISTIC_BYTES, "one name is one name");
    if (strcmp(device->driver, "net_vhost") == 0)
        return 0;
    int count = rte_eth_xstats_get_names(device->port, (struct rte_eth_xstat_name *)names, room);
    return count < 0 ? 0 : count;
}

// Stores the values in the order of the names. Returns false if their number is not `count`.
int dpdk_statistics(const struct dpdk_device *device, uint64_t *values, unsigned count)
{
    return rte_eth_xstats_get_by_id(device->port, NULL, values, count) == (int)count;
}

// Registers the device's interrupts with `epoll`. Returns 0 or an error number.
int dpdk_watch(const struct dpdk_device *device, int epoll)
{
    int error = 0;
    for (uint16_t i = 0; i < device->queues && error == 0; i++)
        error = -rte_eth_dev_rx_intr_ctl_q(device->port, i, epoll, RTE_INTR_EVENT_ADD, NULL);
    return error;
}

// Enables or disables the device's interrupts. Returns 0 or an error number.
int dpdk_set_interrupts(const struct dpdk_device *device, int on)
{
    int error = 0;
    for (uint16_t i = 0; i < device->queues && error == 0; i++)
        error = on ? -rte_eth_dev_rx_intr_enable(device->port, i)
                   : -rte_eth_dev_rx_intr_disable(device->port, i);
    return error;
}

// Drains pending interrupts, so that `epoll` is no longer readable.
void dpdk_take_interrupts(int epoll)
{
    struct rte_epoll_event event;
    while (rte_epoll_wait(epoll, &event, 1, 0) > 0) {
    }
}
