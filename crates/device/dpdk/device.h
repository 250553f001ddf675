// Operations on an ethdev as plain C functions, for the dpdk device.
//
// DPDK's data path consists of inline functions on structures that change with the version
// and the configuration. They stay in this shim: `src/dpdk/sys` sees numbers, bytes and opaque
// pointers only. So it needs no generated bindings and works with every DPDK from 22.11 on.

#ifndef TIDEGATE_DEVICE_H
#define TIDEGATE_DEVICE_H

#include <stdatomic.h>
#include <stdint.h>

#include <rte_mbuf.h>

#include "pool.h"

// Maximum number of frames in one burst, as in src/dpdk/sys/raw.rs.
#define BURST 128
#define DRIVER_BYTES 32
#define STATISTIC_BYTES 64

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

// Properties of a device, which do not change once it is planned.
struct dpdk_info {
    uint16_t mtu;
    // Queues in each direction: planned, and at most.
    uint16_t queues;
    uint16_t queues_max;
    // Maximum frames per burst. Each burst publishes its progress to the peer once: with 64 a
    // memif forwards 5 % less than with 128. With 256 the data of a burst no longer fit in any
    // cache. Between host and guest of a virtual machine 64 is best.
    uint16_t burst;
    uint8_t mac[6];
    uint8_t receive_checksum;
    uint8_t transmit_checksum;
    // RSS: received flows are distributed over the queues.
    uint8_t has_rss;
    // The buffers are frames of the arenas.
    uint8_t takes_frames;
    // TSO is enabled.
    uint8_t cuts;
    char driver[DRIVER_BYTES];
};

// Maximum number of threads that share a device.
#define USERS 64

struct dpdk_queues;

// A device. Its threads have queues of their own.
struct dpdk_device {
    struct dpdk_info info;
    uint16_t port;
    uint8_t is_card;
    uint8_t has_interrupts;
    // The driver has handlers that free memory used by receive and transmit, and that use
    // memory freed by close.
    uint8_t has_handlers;
    // Bursts are announced (handlers.h): there are handlers, or several threads, one of which
    // closes the device.
    uint8_t announces_bursts;
    uint8_t is_started;
    // Bursts are possible. Set only while the device is started.
    atomic_uchar runs;
    uint32_t frame_shift;
    struct rte_device *device;
    // Threads that the device waits for before it starts, and the queues of those that have come.
    unsigned users;
    unsigned joined;
    struct dpdk_queues *queues[USERS];
    // The step that failed, for error messages.
    const char *step;
};

// Queues that one thread uses: first, first + users, and so on, in each direction. All frames are
// transmitted through the first, which preserves their order.
struct dpdk_queues {
    struct dpdk_device *device;
    uint16_t first;
    // Maximum number of descriptors of each ring.
    uint16_t descriptors;
    // Number of mbufs in the pool at the end of its last turn.
    uint32_t level;
    struct dpdk_pool pool;
    // Mbufs for chains; NULL without TSO.
    struct rte_mempool *links;
    // Announces the bursts of this thread.
    unsigned slot;
};

// Receives and frees waiting frames: a driver may leak frames left in its rings. Bounded,
// because a driver that generates frames never runs dry. No thread may be in a burst.
void dpdk_drain(struct dpdk_device *device);

#endif
