// Operations on an ethdev as plain C functions, for the dpdk device.
//
// DPDK's data path consists of inline functions on structures that change with the version
// and the configuration. They stay in this shim: `src/dpdk/sys` sees numbers, bytes and opaque
// pointers only. So it needs no generated bindings and works with every DPDK from 22.11 on.

#ifndef TIDEGATE_DEVICE_H
#define TIDEGATE_DEVICE_H

#include <stdint.h>

#include <rte_mbuf.h>

#include "pool.h"

// Maximum number of frames in one burst, as in src/dpdk/sys/raw.rs.
#define BURST 128
#define DRIVER_BYTES 32
#define STATISTIC_BYTES 64

// All frames are transmitted through one ring, which preserves their order.
enum { TRANSMIT_QUEUE = 0 };

// Number of buffers of a device that needs DPDK's own memory: for its rings and for packets
// in flight.
#define COPIES 8192

// Received: what is known of the transport checksum. Transmitted: the requested offload.
enum {
    CHECKSUM_UNKNOWN = 0,
    CHECKSUM_VERIFIED = 1,
    CHECKSUM_UDP = 2,
    CHECKSUM_TCP = 3,
    // TCP checksum and TSO.
    CHECKSUM_TCP_CUT = 4,
};

// One frame of a burst.
struct dpdk_packet {
    uint8_t *data;
    uint32_t len;
    uint8_t checksum;
    // Header layout, for checksum offload.
    uint8_t is_v6;
    uint8_t link_bytes;
    uint8_t network_bytes;
    // Received: the data are in a frame of the arena that the receiver may take over.
    uint8_t is_frame;
    // TSO: bytes of the TCP header, and payload bytes of each segment.
    uint8_t transport_bytes;
    uint16_t segment_bytes;
};

// Received frames; `mbufs[i]` holds `packets[i]`.
struct dpdk_burst {
    struct rte_mbuf *mbufs[BURST];
    struct dpdk_packet packets[BURST];
};

// State and capabilities of a device.
struct dpdk_device {
    uint16_t port;
    uint16_t mtu;
    uint16_t queues;
    uint16_t queues_max;
    // Maximum frames per burst. Each burst publishes its progress to the peer once: with 64 a
    // memif forwards 5 % less than with 128. With 256 the data of a burst no longer fit in any
    // cache. Between host and guest of a virtual machine 64 is best.
    uint16_t burst;
    uint8_t mac[6];
    uint8_t receive_checksum;
    uint8_t transmit_checksum;
    uint8_t has_interrupts;
    uint8_t runs;
    // RSS: received flows are distributed over the queues.
    uint8_t has_rss;
    // The buffers are frames of the arena.
    uint8_t takes_frames;
    uint8_t is_card;
    // The driver has handlers that free memory used by receive and transmit, and that use
    // memory freed by close.
    uint8_t has_handlers;
    // TSO is enabled.
    uint8_t cuts;
    char driver[DRIVER_BYTES];
    struct dpdk_pool pool;
    // Mbufs for chains; NULL without TSO.
    struct rte_mempool *links;
    // Number of mbufs in the pool at the end of its last turn.
    uint32_t level;
    struct rte_device *device;
    // The step that failed, for error messages.
    const char *step;
};

// Receives and frees waiting frames: a driver may leak frames left in its rings. Bounded,
// because a driver that generates frames never runs dry.
void dpdk_drain(struct dpdk_device *device);

#endif
