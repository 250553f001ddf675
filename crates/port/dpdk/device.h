// What the dpdk port needs of a device, as plain functions.
//
// DPDK's data path is inline functions on structures that change with the
// version and the configuration. They stay on this side: `src/dpdk/sys`
// sees numbers, bytes and pointers that it only hands back, so it needs no
// generated bindings and fits every DPDK from 22.11 on.

#ifndef TIDEGATE_DEVICE_H
#define TIDEGATE_DEVICE_H

#include <stdint.h>

#include <rte_mbuf.h>

#include "pool.h"

// The most frames that a device takes or gives at once; as in src/dpdk/sys/raw.rs.
#define BURST 128
#define DRIVER_BYTES 32
#define STATISTIC_BYTES 64

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
    // The device also cuts the frame into segments.
    CHECKSUM_TCP_CUT = 4,
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
    // How to cut, for CHECKSUM_TCP_CUT: the TCP header, and the data of each segment.
    uint8_t transport_bytes;
    uint16_t segment_bytes;
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
    // Frames to take or give at once. Each burst tells the other side once how far it came:
    // with 64 a memif forwards 5 % less than with 128, and with 256 what a burst touches is
    // in no cache any more. The host and the guest of a virtual machine do best with 64.
    uint16_t burst;
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
    // It cuts what TCP sends into segments.
    uint8_t cuts;
    char driver[DRIVER_BYTES];
    struct tg_pool pool;
    // For chains; NULL unless it cuts.
    struct rte_mempool *links;
    // How many mbufs were in the pool when its last turn ended.
    uint32_t level;
    struct rte_device *device;
    // What failed, for people.
    const char *step;
};

// Takes what has arrived and gives it back unseen: a driver may forget what
// waits in its rings. One that makes frames itself never comes to an end.
void tg_drain(struct tg_device *device);

#endif
