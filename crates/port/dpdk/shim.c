// What the dpdk port needs of DPDK, as plain functions.
//
// DPDK's data path is inline functions on structures that change with the
// version and the configuration. They stay on this side: `src/dpdk/sys.rs`
// sees numbers, bytes and pointers that it only hands back, so it needs no
// generated bindings and fits every DPDK from 22.11 on.

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_epoll.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_interrupts.h>
#include <rte_log.h>
#include <rte_mbuf.h>

// As in sys.rs.
#define BURST 64
#define DRIVER_BYTES 32
#define DESCRIPTORS 1024

enum { QUEUE = 0 };

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
};

// Frames that this side owns; `mbufs[i]` holds `packets[i]`.
struct tg_burst {
    struct rte_mbuf *mbufs[BURST];
    struct tg_packet packets[BURST];
};

// What a device is and does.
struct tg_device {
    uint16_t port;
    uint16_t mtu;
    uint8_t mac[6];
    uint8_t receive_checksum;
    uint8_t transmit_checksum;
    uint8_t has_interrupts;
    uint8_t runs;
    char driver[DRIVER_BYTES];
    struct rte_mempool *pool;
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
    return rte_eal_init(argc, argv) < 0 ? rte_errno : 0;
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

static int configure(struct tg_device *device, const struct rte_eth_dev_info *info, int interrupts)
{
    const uint64_t receive = RTE_ETH_RX_OFFLOAD_UDP_CKSUM | RTE_ETH_RX_OFFLOAD_TCP_CKSUM;
    const uint64_t transmit = RTE_ETH_TX_OFFLOAD_UDP_CKSUM | RTE_ETH_TX_OFFLOAD_TCP_CKSUM;
    struct rte_eth_conf conf;
    memset(&conf, 0, sizeof(conf));
    if (!is_paravirtual(device->driver)) {
        device->receive_checksum = (info->rx_offload_capa & receive) == receive;
        device->transmit_checksum = (info->tx_offload_capa & transmit) == transmit;
    }
    conf.rxmode.offloads = device->receive_checksum ? receive : 0;
    conf.txmode.offloads = device->transmit_checksum ? transmit : 0;
    conf.intr_conf.rxq = interrupts;

    uint16_t port = device->port, receives = DESCRIPTORS, transmits = DESCRIPTORS;
    unsigned socket = rte_eth_dev_socket_id(port);
    device->step = "configure it";
    int error = rte_eth_dev_configure(port, 1, 1, &conf);
    if (error == 0) {
        device->step = "choose the size of its rings";
        error = rte_eth_dev_adjust_nb_rx_tx_desc(port, &receives, &transmits);
    }
    if (error == 0) {
        struct rte_eth_rxconf queue = info->default_rxconf;
        queue.offloads = conf.rxmode.offloads;
        device->step = "set up its receive ring";
        error = rte_eth_rx_queue_setup(port, QUEUE, receives, socket, &queue, device->pool);
    }
    if (error == 0) {
        struct rte_eth_txconf queue = info->default_txconf;
        queue.offloads = conf.txmode.offloads;
        device->step = "set up its transmit ring";
        error = rte_eth_tx_queue_setup(port, QUEUE, transmits, socket, &queue);
    }
    if (error == 0) {
        device->step = "start it";
        error = rte_eth_dev_start(port);
        device->runs = error == 0;
    }
    return -error;
}

// Stops the device and starts it again. Returns 0 or an error number.
int tg_restart(struct tg_device *device)
{
    rte_eth_dev_stop(device->port);
    int error = rte_eth_dev_start(device->port);
    device->runs = error == 0;
    return -error;
}

void tg_close(struct tg_device *device)
{
    rte_eth_dev_stop(device->port);
    rte_eth_dev_close(device->port);
    if (device->device != NULL)
        rte_dev_remove(device->device);
    rte_mempool_free(device->pool);
    device->pool = NULL;
}

// Starts a device with one queue in each direction, whose buffers hold
// `data_bytes`. Returns 0, or an error number with `step` set.
int tg_open(const char *name, unsigned buffers, uint16_t data_bytes, struct tg_device *device)
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
        snprintf(device->driver, sizeof(device->driver), "%s", info.driver_name);
        char pool[RTE_MEMPOOL_NAMESIZE];
        snprintf(pool, sizeof(pool), "tidegate%u", port);
        // Last in, first out: what was freed last is still in cache. Without
        // per-thread caches, since any thread may have the port's turn.
        device->step = "get memory for its buffers";
        device->pool = rte_pktmbuf_pool_create_by_ops(pool, buffers, 0, 0,
            data_bytes + RTE_PKTMBUF_HEADROOM, rte_eth_dev_socket_id(port), "stack");
        error = device->pool == NULL ? rte_errno : 0;
    }
    if (error == 0) {
        error = configure(device, &info, 1);
        device->has_interrupts = error == 0 && rte_eth_dev_rx_intr_enable(port, QUEUE) == 0;
        if (device->has_interrupts)
            rte_eth_dev_rx_intr_disable(port, QUEUE);
        else if (error != 0) {
            rte_eth_dev_stop(port);
            error = configure(device, &info, 0);
        }
    }
    if (error == 0) {
        struct rte_ether_addr mac;
        device->step = "ask for its addresses";
        error = -rte_eth_macaddr_get(port, &mac);
        memcpy(device->mac, mac.addr_bytes, sizeof(device->mac));
        if (error == 0)
            error = -rte_eth_dev_get_mtu(port, &device->mtu);
        // Neighbour discovery comes to groups. A driver that cannot be told so
        // takes them anyway, or everything.
        if (rte_eth_allmulticast_enable(port) != 0)
            rte_eth_promiscuous_enable(port);
    }
    if (error != 0)
        tg_close(device);
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

// Fills the burst with what has arrived. A frame in pieces that do not fit
// into one buffer has no data.
unsigned tg_receive(const struct tg_device *device, struct tg_burst *burst)
{
    // DPDK takes a burst of a device that is stopped for a mistake.
    unsigned count = device->runs ? rte_eth_rx_burst(device->port, QUEUE, burst->mbufs, BURST) : 0;
    for (unsigned i = 0; i < count; i++)
        rte_prefetch0(rte_pktmbuf_mtod(burst->mbufs[i], void *));
    for (unsigned i = 0; i < count; i++) {
        struct rte_mbuf *mbuf = burst->mbufs[i];
        int whole = mbuf->nb_segs == 1 || rte_pktmbuf_linearize(mbuf) == 0;
        struct tg_packet *packet = &burst->packets[i];
        packet->data = whole ? rte_pktmbuf_mtod(mbuf, uint8_t *) : NULL;
        packet->len = mbuf->pkt_len;
        packet->checksum = checksum_of(device, mbuf);
    }
    return count;
}

// Gives frames back that begin at `from`.
void tg_release(struct tg_burst *burst, unsigned from, unsigned count)
{
    rte_pktmbuf_free_bulk(burst->mbufs + from, count);
}

// Takes `count` buffers to send. Returns whether there were so many.
int tg_allocate(const struct tg_device *device, struct tg_burst *burst, unsigned count)
{
    if (rte_pktmbuf_alloc_bulk(device->pool, burst->mbufs, count) != 0)
        return 0;
    for (unsigned i = 0; i < count; i++)
        burst->packets[i].data = rte_pktmbuf_mtod(burst->mbufs[i], uint8_t *);
    return 1;
}

// Makes ready what stands in the burst's packets. Returns how many frames from
// the first the device can send; the next one it refuses.
unsigned tg_prepare(const struct tg_device *device, struct tg_burst *burst, unsigned count)
{
    int asks = 0;
    for (unsigned i = 0; i < count; i++) {
        struct rte_mbuf *mbuf = burst->mbufs[i];
        const struct tg_packet *packet = &burst->packets[i];
        mbuf->pkt_len = packet->len;
        mbuf->data_len = packet->len;
        if (packet->checksum == CHECKSUM_UNKNOWN)
            continue;
        asks = 1;
        mbuf->l2_len = packet->link_bytes;
        mbuf->l3_len = packet->network_bytes;
        mbuf->ol_flags |= packet->is_v6 ? RTE_MBUF_F_TX_IPV6 : RTE_MBUF_F_TX_IPV4;
        mbuf->ol_flags |= packet->checksum == CHECKSUM_TCP ? RTE_MBUF_F_TX_TCP_CKSUM
                                                           : RTE_MBUF_F_TX_UDP_CKSUM;
    }
    return asks && device->runs ? rte_eth_tx_prepare(device->port, QUEUE, burst->mbufs, count) : count;
}

// Sends frames that begin at `from` and returns how many the device took.
unsigned tg_transmit(const struct tg_device *device, struct tg_burst *burst, unsigned from,
    unsigned count)
{
    return device->runs ? rte_eth_tx_burst(device->port, QUEUE, burst->mbufs + from, count) : 0;
}

// Has interrupts of the device make `epoll` readable. Returns 0 or an error.
int tg_watch(const struct tg_device *device, int epoll)
{
    return -rte_eth_dev_rx_intr_ctl_q(device->port, QUEUE, epoll, RTE_INTR_EVENT_ADD, NULL);
}

// Turns the device's interrupts on or off. Returns 0 or an error.
int tg_set_interrupts(const struct tg_device *device, int on)
{
    return on ? -rte_eth_dev_rx_intr_enable(device->port, QUEUE)
              : -rte_eth_dev_rx_intr_disable(device->port, QUEUE);
}

// Takes note of interrupts that have come, so that `epoll` is not readable.
void tg_take_interrupts(int epoll)
{
    struct rte_epoll_event event;
    while (rte_epoll_wait(epoll, &event, 1, 0) > 0) {
    }
}
