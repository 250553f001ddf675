/* Endpoint of the rdma device: an unreliable datagram queue pair over the memory of an arena.
 *
 * Offsets are in bytes from the start of that memory. All functions but rdma_open, rdma_reach,
 * rdma_stop and rdma_close belong to one thread and never wait. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Most messages of one call. */
#define RDMA_BURST 64
/* Bytes in front of each received message: the global routing header. */
#define RDMA_HEADER_BYTES 40
#define RDMA_GID_BYTES 16

struct rdma_endpoint;

struct rdma_settings {
    const char *device;
    /* Multicast group of all endpoints that form a network. */
    uint8_t group[RDMA_GID_BYTES];
    uint8_t *memory;
    size_t memory_bytes;
    /* Bytes of a receive buffer. */
    uint32_t buffer_bytes;
    uint32_t receive_depth;
    uint32_t send_depth;
    uint8_t port;
};

struct rdma_info {
    uint8_t gid[RDMA_GID_BYTES];
    uint32_t queue_pair;
    /* Longest message. */
    uint32_t message_bytes;
    /* Network interface beneath. */
    uint32_t interface;
    /* Readable after rdma_arm when a message arrives. */
    int event_fd;
};

struct rdma_received {
    uint64_t offset;
    uint32_t bytes;
    uint32_t queue_pair;
    uint8_t gid[RDMA_GID_BYTES];
    /* 0, or the status of a message that was not received (enum ibv_wc_status). */
    uint32_t status;
};

struct rdma_message {
    uint64_t offset;
    /* As rdma_reach returned it; null for the multicast group. */
    void *path;
    uint32_t bytes;
    uint32_t queue_pair;
};

/* Opens the device. On failure returns null, with the step in `step` and the reason in errno. */
struct rdma_endpoint *rdma_open(const struct rdma_settings *settings, struct rdma_info *info,
                                const char **step);

/* Hands over buffers for messages; returns how many were taken. Each is filled from its offset on,
 * and the header before it. */
int rdma_post_buffers(struct rdma_endpoint *endpoint, const uint64_t *offsets, int count);

/* Takes messages that have arrived; -1 when the device is gone. */
int rdma_receive(struct rdma_endpoint *endpoint, struct rdma_received *received, int max);

/* Sends messages; returns how many were taken. */
int rdma_send(struct rdma_endpoint *endpoint, const struct rdma_message *messages, int count);

/* Takes messages that the device has sent, or could not send: those have a bit in `failed`. -1
 * when the device is gone. */
int rdma_reap(struct rdma_endpoint *endpoint, uint64_t *offsets, uint64_t *failed, int max);

/* Has the next message make event_fd readable. 0, or the error. */
int rdma_arm(struct rdma_endpoint *endpoint);

/* Path to the port with this address, for messages to its queue pairs; null if there is none, or if
 * there are too many. May wait for seconds: for one thread that does nothing else. */
void *rdma_reach(struct rdma_endpoint *endpoint, const uint8_t *gid);

/* Ends all traffic: afterwards the device writes to no buffer. */
void rdma_stop(struct rdma_endpoint *endpoint);

void rdma_close(struct rdma_endpoint *endpoint);
