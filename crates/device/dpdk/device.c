// Device lifecycle: open, plan, join, start, stop, close; capabilities and counters.

#include "device.h"

#include <errno.h>
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
static int takes_frames(const struct dpdk_device *device, const char *name)
{
    static const char *const copying[] = { "net_memif", "net_null", "net_pcap", "net_ring",
        "net_tap", "net_vhost" };
    const char *driver = device->info.driver;
    uint32_t room = ((uint32_t)1 << device->frame_shift) - 1 - RTE_PKTMBUF_HEADROOM;
    if (strstr(name, "zero-copy=yes") != NULL)
        return 0;
    for (unsigned i = 0; i < RTE_DIM(copying); i++)
        if (strcmp(driver, copying[i]) == 0)
            return 1;
    return room >= COMMON_ROOM && (device->is_card || strcmp(driver, "net_af_packet") == 0);
}

// A pool with mbufs still in use keeps its name, so each pool gets a new name.
static void name_pool(char name[RTE_MEMPOOL_NAMESIZE])
{
    static atomic_uint number;
    snprintf(name, RTE_MEMPOOL_NAMESIZE, "tidegate%u", atomic_fetch_add(&number, 1));
}

static int make_pool(struct dpdk_queues *queues, const struct dpdk_memory *memory)
{
    struct dpdk_device *device = queues->device;
    const struct dpdk_info *info = &device->info;
    char name[RTE_MEMPOOL_NAMESIZE];
    int socket = rte_eth_dev_socket_id(device->port);
    name_pool(name);
    if (!info->takes_frames) {
        device->step = "get memory for its buffers";
        uint32_t frame_bytes = (uint32_t)1 << memory->shift;
        uint16_t data_bytes = RTE_MIN(RTE_MAX(frame_bytes, 2048u), 16384u);
        return dpdk_pool_of_copies(&queues->pool, name, COPIES, data_bytes, info->burst, socket);
    }
    device->step = "use arenas of different frame sizes";
    if (memory->shift != device->frame_shift)
        return EINVAL;
    device->step = "reach the packet buffers in ordinary memory";
    if (device->is_card && !dpdk_is_virtual() && memory->page_bytes <= 4096)
        return EFAULT;
    device->step = "register the packet buffers";
    int error = device->is_card ? dpdk_show_to_cards(memory) : 0;
    if (error != 0)
        return error;
    device->step = "get memory for the descriptions of its buffers";
    error = dpdk_pool_of_frames(&queues->pool, name, memory, info->burst, socket);
    if (error != 0) {
        if (device->is_card)
            dpdk_hide_from_cards(memory);
        return error;
    }
    device->step = "map the packet buffers";
    return device->is_card ? dpdk_let_reach(device->device, memory, 1) : 0;
}

static int make_links(struct dpdk_queues *queues)
{
    char name[RTE_MEMPOOL_NAMESIZE];
    queues->device->step = "get memory for chains";
    name_pool(name);
    queues->links = dpdk_pool_of_links(name, rte_eth_dev_socket_id(queues->device->port));
    return queues->links == NULL ? rte_errno : 0;
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
    start->device->is_started = start->error == 0;
}

// Starts the device. Returns 0 or a negative error number.
static int start(struct dpdk_device *device)
{
    struct start start = { .device = device };
    change(device, do_start, &start);
    return start.error;
}

// True if the device supports TSO on frames of the arena, as chains.
static int can_cut(const struct dpdk_info *info, const struct rte_eth_dev_info *about)
{
    const uint64_t needed = RTE_ETH_TX_OFFLOAD_TCP_TSO | RTE_ETH_TX_OFFLOAD_MULTI_SEGS
        | RTE_ETH_TX_OFFLOAD_IPV4_CKSUM;
    uint16_t most = about->tx_desc_lim.nb_seg_max;
    return info->takes_frames && info->transmit_checksum
        && (about->tx_offload_capa & needed) == needed && (most == 0 || most >= LINKS_OF_FRAME);
}

static const uint64_t receive_checksums =
    RTE_ETH_RX_OFFLOAD_UDP_CKSUM | RTE_ETH_RX_OFFLOAD_TCP_CKSUM;
static const uint64_t transmit_checksums =
    RTE_ETH_TX_OFFLOAD_UDP_CKSUM | RTE_ETH_TX_OFFLOAD_TCP_CKSUM;

// What RSS distributes flows by.
static uint64_t hashed_fields(const struct rte_eth_dev_info *about)
{
    const uint64_t flows = RTE_ETH_RSS_IP | RTE_ETH_RSS_UDP | RTE_ETH_RSS_TCP;
    return about->flow_type_rss_offloads & flows;
}

// Chooses `queues` queues in each direction for `users` threads, and the offloads; with
// `segmentation` TSO if the device supports it. Returns 0, or an error number with `step` set.
int dpdk_plan(struct dpdk_device *device, uint16_t queues, unsigned users, int segmentation)
{
    struct dpdk_info *info = &device->info;
    struct rte_eth_dev_info about;
    device->step = "share it among so many threads";
    if (users < 1 || users > USERS || users > queues)
        return EINVAL;
    device->step = "ask what it can do";
    int error = -rte_eth_dev_info_get(device->port, &about);
    if (error != 0)
        return error;
    info->queues = queues;
    device->users = users;
    device->announces_bursts = device->has_handlers || users > 1;
    if (!is_paravirtual(info->driver)) {
        info->receive_checksum = (about.rx_offload_capa & receive_checksums) == receive_checksums;
        info->transmit_checksum =
            (about.tx_offload_capa & transmit_checksums) == transmit_checksums;
    }
    info->cuts = segmentation && can_cut(info, &about);
    info->has_rss = queues > 1 && hashed_fields(&about) != 0;
    return 0;
}

static int set_up_queue(struct dpdk_device *device, const struct rte_eth_conf *conf,
    const struct rte_eth_dev_info *about, uint16_t queue)
{
    const struct dpdk_queues *queues = device->queues[queue % device->users];
    struct rte_eth_rxconf receiving = about->default_rxconf;
    struct rte_eth_txconf transmitting = about->default_txconf;
    receiving.offloads = conf->rxmode.offloads;
    transmitting.offloads = conf->txmode.offloads;
    uint16_t port = device->port;
    uint16_t receives = queues->descriptors, transmits = queues->descriptors;
    unsigned socket = rte_eth_dev_socket_id(port);
    device->step = "choose the size of its rings";
    int error = rte_eth_dev_adjust_nb_rx_tx_desc(port, &receives, &transmits);
    if (error == 0) {
        device->step = "set up a receive ring";
        error = rte_eth_rx_queue_setup(port, queue, receives, socket, &receiving,
            queues->pool.mempool);
    }
    if (error == 0) {
        device->step = "set up a transmit ring";
        error = rte_eth_tx_queue_setup(port, queue, transmits, socket, &transmitting);
    }
    return error;
}

static int configure(struct dpdk_device *device, const struct rte_eth_dev_info *about,
    int interrupts)
{
    const struct dpdk_info *info = &device->info;
    struct rte_eth_conf conf;
    memset(&conf, 0, sizeof(conf));
    conf.rxmode.offloads = info->receive_checksum ? receive_checksums : 0;
    conf.txmode.offloads = info->transmit_checksum ? transmit_checksums : 0;
    if (info->cuts)
        conf.txmode.offloads |= RTE_ETH_TX_OFFLOAD_TCP_TSO | RTE_ETH_TX_OFFLOAD_MULTI_SEGS
            | RTE_ETH_TX_OFFLOAD_IPV4_CKSUM;
    conf.intr_conf.rxq = interrupts;
    conf.rx_adv_conf.rss_conf.rss_hf = hashed_fields(about);
    if (info->has_rss)
        conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;

    device->step = "configure it";
    int error = rte_eth_dev_configure(device->port, info->queues, info->queues, &conf);
    for (uint16_t queue = 0; queue < info->queues && error == 0; queue++)
        error = set_up_queue(device, &conf, about, queue);
    if (error == 0 && strcmp(info->driver, "net_virtio_user") == 0 && dpdk_cards_see_any()) {
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
    atomic_store_explicit(&device->runs, 0, memory_order_relaxed);
    rte_eth_dev_stop(device->port);
    device->is_started = 0;
}

// Stops and restarts a device with handlers: all of its threads exclude them. Returns 0 or an error
// number.
int dpdk_restart(struct dpdk_device *device)
{
    change(device, stop, device);
    int error = start(device);
    atomic_store_explicit(&device->runs, error == 0, memory_order_release);
    return -error;
}

// True if the device is a NIC with DMA access to the frames of these queues.
static int shows_frames(const struct dpdk_queues *queues)
{
    return queues->device->is_card && queues->device->info.takes_frames
        && queues->pool.mempool != NULL;
}

static void stop_and_close(void *argument)
{
    struct dpdk_device *device = argument;
    if (device->has_handlers)
        dpdk_unwatch_handlers(device->port);
    stop(device);
    for (unsigned i = 0; i < device->joined; i++)
        if (shows_frames(device->queues[i]))
            dpdk_let_reach(device->device, &device->queues[i]->pool.memory, 0);
    rte_eth_dev_close(device->port);
}

// Ends the bursts of all threads, and waits for those that have begun.
static void end_bursts(struct dpdk_device *device)
{
    unsigned slots[USERS];
    atomic_store_explicit(&device->runs, 0, memory_order_relaxed);
    for (unsigned i = 0; i < device->joined; i++)
        slots[i] = device->queues[i]->slot;
    if (device->announces_bursts)
        dpdk_await_bursts(slots, device->joined);
}

// Closes the device for all of its threads. Only the pools remain, with the mbufs that were
// returned.
void dpdk_close(struct dpdk_device *device)
{
    end_bursts(device);
    dpdk_drain(device);
    change(device, stop_and_close, device);
    if (device->device != NULL)
        rte_dev_remove(device->device);
    for (unsigned i = 0; i < device->joined; i++)
        if (shows_frames(device->queues[i]))
            dpdk_hide_from_cards(&device->queues[i]->pool.memory);
}

// Frees a closed device whose queues are gone.
void dpdk_free(struct dpdk_device *device)
{
    free(device);
}

// Frees the pool of queues whose device is closed. The pool should contain `frames` frames of the
// arena. Returns false if any of its mbufs is still in use.
int dpdk_leave(struct dpdk_queues *queues, unsigned frames)
{
    dpdk_return_slot(queues->slot);
    if (queues->links != NULL && rte_mempool_avail_count(queues->links) < LINKS)
        return 0;
    rte_mempool_free(queues->links);
    queues->links = NULL;
    return dpdk_pool_free(&queues->pool, queues->device->info.takes_frames ? frames : COPIES);
}

// Probes a device for arenas with frames of `1 << frame_shift` bytes. Returns 0, or an error number
// with the step that failed, if the device was found.
int dpdk_open(const char *name, uint32_t frame_shift, struct dpdk_device **opened, const char **step)
{
    *step = NULL;
    struct dpdk_device *device = calloc(1, sizeof(*device));
    if (device == NULL)
        return ENOMEM;
    int error = probe(name, &device->port);
    if (error != 0) {
        free(device);
        return error;
    }
    uint16_t port = device->port;
    struct dpdk_info *info = &device->info;
    struct rte_eth_dev_info about;
    device->step = "ask what it can do";
    error = -rte_eth_dev_info_get(port, &about);
    if (error == 0) {
        device->device = about.device;
        device->is_card = strcmp(rte_bus_name(rte_dev_bus(about.device)), "vdev") != 0;
        device->frame_shift = frame_shift;
        info->queues_max = RTE_MIN(about.max_rx_queues, about.max_tx_queues);
        snprintf(info->driver, sizeof(info->driver), "%s", about.driver_name);
        info->burst = is_paravirtual(info->driver) ? BURST / 2 : BURST;
        info->takes_frames = takes_frames(device, name);
        // A memif unmaps its rings when the peer exits.
        device->has_handlers = strcmp(info->driver, "net_memif") == 0;
        if (device->has_handlers)
            dpdk_watch_handlers(port);
        struct rte_ether_addr mac;
        device->step = "ask for its addresses";
        error = -rte_eth_macaddr_get(port, &mac);
        memcpy(info->mac, mac.addr_bytes, sizeof(info->mac));
        if (error == 0)
            error = -rte_eth_dev_get_mtu(port, &info->mtu);
    }
    if (error != 0) {
        *step = device->step;
        dpdk_close(device);
        free(device);
        return error;
    }
    *opened = device;
    return 0;
}

// Properties of the device.
void dpdk_describe(const struct dpdk_device *device, struct dpdk_info *info)
{
    *info = device->info;
}

// The step that failed last.
const char *dpdk_step(const struct dpdk_device *device)
{
    return device->step;
}

// Adds the queues of the next thread to a planned device, with a pool over its arena. Rings have up
// to `descriptors` descriptors. Returns 0, or an error number with `step` set.
int dpdk_join(struct dpdk_device *device, const struct dpdk_memory *memory, uint16_t descriptors,
    struct dpdk_queues *queues)
{
    memset(queues, 0, sizeof(*queues));
    device->step = "share it with one more thread";
    if (device->joined == device->users)
        return EINVAL;
    int error = dpdk_take_slot(&queues->slot);
    if (error != 0)
        return error;
    queues->device = device;
    queues->first = (uint16_t)device->joined;
    queues->descriptors = descriptors;
    error = make_pool(queues, memory);
    if (error == 0 && device->info.cuts)
        error = make_links(queues);
    // Also a pool that could not be made: the device is closed with all that it has.
    device->queues[device->joined++] = queues;
    if (error == 0)
        queues->level = rte_mempool_avail_count(queues->pool.mempool);
    return error;
}

// True if the driver, with interrupts, closes their descriptors twice. By the second time a
// descriptor may belong to another thread.
static int closes_twice(const char *driver)
{
    return strcmp(driver, "net_virtio_user") == 0;
}

// Starts the device, which all its threads have joined. Returns 0, or an error number with `step`
// set; the caller must then close the device.
int dpdk_run(struct dpdk_device *device)
{
    uint16_t port = device->port;
    struct rte_eth_dev_info about;
    device->step = "ask what it can do";
    int error = -rte_eth_dev_info_get(port, &about);
    if (error != 0)
        return error;
    int interrupts = !closes_twice(device->info.driver);
    error = configure(device, &about, interrupts);
    device->has_interrupts = error == 0 && interrupts
        && rte_eth_dev_rx_intr_enable(port, 0) == 0;
    if (device->has_interrupts) {
        rte_eth_dev_rx_intr_disable(port, 0);
    } else if (error != 0 && interrupts) {
        rte_eth_dev_stop(port);
        device->is_started = 0;
        error = configure(device, &about, 0);
    }
    // IPv6 neighbour discovery uses multicast. A driver without an all-multicast setting
    // receives multicast frames anyway, or needs promiscuous mode.
    if (error == 0 && rte_eth_allmulticast_enable(port) != 0)
        rte_eth_promiscuous_enable(port);
    atomic_store_explicit(&device->runs, error == 0, memory_order_release);
    return error;
}

// Returns true if the link is up.
int dpdk_link_is_up(const struct dpdk_device *device)
{
    struct rte_eth_link link;
    memset(&link, 0, sizeof(link));
    return device->is_started && rte_eth_link_get_nowait(device->port, &link) == 0
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
    if (strcmp(device->info.driver, "net_vhost") == 0)
        return 0;
    int count = rte_eth_xstats_get_names(device->port, (struct rte_eth_xstat_name *)names, room);
    return count < 0 ? 0 : count;
}

// Stores the values in the order of the names. Returns false if their number is not `count`.
int dpdk_statistics(const struct dpdk_device *device, uint64_t *values, unsigned count)
{
    return rte_eth_xstats_get_by_id(device->port, NULL, values, count) == (int)count;
}

// True if the device has receive interrupts.
int dpdk_has_interrupts(const struct dpdk_device *device)
{
    return device->has_interrupts;
}

// Registers the interrupts of the queues with `epoll`. Returns 0, or an error number if none is
// registered.
int dpdk_watch(const struct dpdk_queues *queues, int epoll)
{
    const struct dpdk_device *device = queues->device;
    for (unsigned i = queues->first; i < device->info.queues; i += device->users) {
        int error = rte_eth_dev_rx_intr_ctl_q(device->port, i, epoll, RTE_INTR_EVENT_ADD, NULL);
        if (error == 0)
            continue;
        for (unsigned j = queues->first; j < i; j += device->users)
            rte_eth_dev_rx_intr_ctl_q(device->port, j, epoll, RTE_INTR_EVENT_DEL, NULL);
        return -error;
    }
    return 0;
}

// Enables or disables the interrupts of the queues. Returns 0 or an error number.
int dpdk_set_interrupts(const struct dpdk_queues *queues, int on)
{
    const struct dpdk_device *device = queues->device;
    int error = 0;
    for (unsigned i = queues->first; i < device->info.queues && error == 0; i += device->users)
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
