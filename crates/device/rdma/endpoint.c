#include "endpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

/* Where messages go to all members of a multicast group (InfiniBand Architecture, 10.5). */
#define MULTICAST_QUEUE_PAIR 0xffffff
/* Key that all endpoints of a network share. */
#define QUEUE_KEY 0x74696465
#define MAX_PATHS 1024
#define MAX_GIDS 256
/* Multicast stays on the link, as the group's address says. */
#define HOP_LIMIT 1

struct rdma_endpoint {
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_mr *memory;
    struct ibv_mr *rest;
    struct ibv_comp_channel *channel;
    struct ibv_cq *received;
    struct ibv_cq *sent;
    struct ibv_qp *queue_pair;
    struct ibv_ah *group;
    struct ibv_ah *paths[MAX_PATHS];
    size_t path_count;
    uint8_t *base;
    /* Where the end of a message goes that is longer than its buffer. */
    uint8_t *rest_bytes;
    uint32_t buffer_bytes;
    uint32_t rest_len;
    uint8_t port;
    uint8_t gid_index;
};

static struct ibv_context *open_context(const char *name) {
    int count = 0;
    struct ibv_device **devices = ibv_get_device_list(&count);
    if (!devices)
        return NULL;
    struct ibv_context *context = NULL;
    errno = ENODEV;
    for (int at = 0; at < count; at++)
        if (!strcmp(ibv_get_device_name(devices[at]), name)) {
            context = ibv_open_device(devices[at]);
            break;
        }
    ibv_free_device_list(devices);
    return context;
}

/* Finds a link-local IPv6 address by RoCE version 2. */
static int choose_gid(struct rdma_endpoint *endpoint, struct rdma_info *info) {
    static const uint8_t link_local[8] = {0xfe, 0x80};
    struct ibv_gid_entry entries[MAX_GIDS];
    ssize_t count = ibv_query_gid_table(endpoint->context, entries, MAX_GIDS, 0);
    for (ssize_t at = 0; at < count; at++) {
        const struct ibv_gid_entry *entry = &entries[at];
        if (entry->port_num == endpoint->port && entry->gid_type == IBV_GID_TYPE_ROCE_V2 &&
            !memcmp(entry->gid.raw, link_local, sizeof link_local)) {
            endpoint->gid_index = (uint8_t)entry->gid_index;
            memcpy(info->gid, entry->gid.raw, RDMA_GID_BYTES);
            info->interface = entry->ndev_ifindex;
            return 0;
        }
    }
    errno = EADDRNOTAVAIL;
    return -1;
}

static struct ibv_ah *make_path(struct rdma_endpoint *endpoint, const uint8_t *gid) {
    struct ibv_ah_attr attributes = {
        .is_global = 1,
        .port_num = endpoint->port,
        .grh = {.sgid_index = endpoint->gid_index, .hop_limit = HOP_LIMIT},
    };
    memcpy(attributes.grh.dgid.raw, gid, RDMA_GID_BYTES);
    return ibv_create_ah(endpoint->domain, &attributes);
}

static int make_queue_pair(struct rdma_endpoint *endpoint, const struct rdma_settings *settings) {
    struct ibv_qp_init_attr create = {
        .send_cq = endpoint->sent,
        .recv_cq = endpoint->received,
        .qp_type = IBV_QPT_UD,
        .sq_sig_all = 1,
        .cap = {.max_send_wr = settings->send_depth,
                .max_recv_wr = settings->receive_depth,
                .max_send_sge = 1,
                .max_recv_sge = 2},
    };
    endpoint->queue_pair = ibv_create_qp(endpoint->domain, &create);
    if (!endpoint->queue_pair)
        return -1;
    struct ibv_qp_attr to = {
        .qp_state = IBV_QPS_INIT, .port_num = endpoint->port, .qkey = QUEUE_KEY};
    int error = ibv_modify_qp(endpoint->queue_pair, &to,
                              IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    if (!error) {
        to.qp_state = IBV_QPS_RTR;
        error = ibv_modify_qp(endpoint->queue_pair, &to, IBV_QP_STATE);
    }
    if (!error) {
        to.qp_state = IBV_QPS_RTS;
        error = ibv_modify_qp(endpoint->queue_pair, &to, IBV_QP_STATE | IBV_QP_SQ_PSN);
    }
    errno = error;
    return error ? -1 : 0;
}

static int set_nonblocking(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 ? -1 : fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

/* Returns the step that failed; null if none did. */
static const char *prepare(struct rdma_endpoint *endpoint, const struct rdma_settings *settings,
                           struct rdma_info *info) {
    struct ibv_port_attr port;
    if (!(endpoint->context = open_context(settings->device)))
        return "open the device";
    if ((errno = ibv_query_port(endpoint->context, endpoint->port, &port)))
        return "read the state of the port";
    errno = ENETDOWN;
    if (port.state != IBV_PORT_ACTIVE)
        return "use the port, which is down";
    info->message_bytes = 128u << port.active_mtu;
    if (choose_gid(endpoint, info))
        return "find a link-local IPv6 address with RoCE version 2";
    if (!(endpoint->domain = ibv_alloc_pd(endpoint->context)))
        return "allocate a protection domain";
    endpoint->rest_len = info->message_bytes;
    if (!(endpoint->rest_bytes = malloc(endpoint->rest_len)))
        return "allocate memory";
    endpoint->memory = ibv_reg_mr(endpoint->domain, settings->memory, settings->memory_bytes,
                                  IBV_ACCESS_LOCAL_WRITE);
    endpoint->rest = ibv_reg_mr(endpoint->domain, endpoint->rest_bytes, endpoint->rest_len,
                                IBV_ACCESS_LOCAL_WRITE);
    if (!endpoint->memory || !endpoint->rest)
        return "register the packet buffers (`ulimit -l` limits them)";
    if (!(endpoint->channel = ibv_create_comp_channel(endpoint->context)) ||
        set_nonblocking(endpoint->channel->fd))
        return "create a channel of events";
    info->event_fd = endpoint->channel->fd;
    endpoint->received = ibv_create_cq(endpoint->context, (int)settings->receive_depth, NULL,
                                       endpoint->channel, 0);
    endpoint->sent =
        ibv_create_cq(endpoint->context, (int)settings->send_depth, NULL, NULL, 0);
    if (!endpoint->received || !endpoint->sent)
        return "create completion queues";
    if (make_queue_pair(endpoint, settings))
        return "create a queue pair for datagrams";
    info->queue_pair = endpoint->queue_pair->qp_num;
    union ibv_gid group;
    memcpy(group.raw, settings->group, RDMA_GID_BYTES);
    if ((errno = ibv_attach_mcast(endpoint->queue_pair, &group, 0)))
        return "join the multicast group";
    if (!(endpoint->group = make_path(endpoint, settings->group)))
        return "reach the multicast group";
    return NULL;
}

struct rdma_endpoint *rdma_open(const struct rdma_settings *settings, struct rdma_info *info,
                                const char **step) {
    struct rdma_endpoint *endpoint = calloc(1, sizeof *endpoint);
    *step = "allocate memory";
    if (!endpoint)
        return NULL;
    endpoint->base = settings->memory;
    endpoint->buffer_bytes = settings->buffer_bytes;
    endpoint->port = settings->port;
    if ((*step = prepare(endpoint, settings, info))) {
        int error = errno;
        rdma_close(endpoint);
        errno = error;
        return NULL;
    }
    return endpoint;
}

int rdma_post_buffers(struct rdma_endpoint *endpoint, const uint64_t *offsets, int count) {
    struct ibv_recv_wr requests[RDMA_BURST], *bad = NULL;
    struct ibv_sge parts[RDMA_BURST][2];
    if (count > RDMA_BURST)
        count = RDMA_BURST;
    for (int at = 0; at < count; at++) {
        parts[at][0] = (struct ibv_sge){
            .addr = (uintptr_t)(endpoint->base + offsets[at] - RDMA_HEADER_BYTES),
            .length = RDMA_HEADER_BYTES + endpoint->buffer_bytes,
            .lkey = endpoint->memory->lkey,
        };
        parts[at][1] = (struct ibv_sge){
            .addr = (uintptr_t)endpoint->rest_bytes,
            .length = endpoint->rest_len,
            .lkey = endpoint->rest->lkey,
        };
        requests[at] = (struct ibv_recv_wr){
            .wr_id = offsets[at],
            .next = at + 1 < count ? &requests[at + 1] : NULL,
            .sg_list = parts[at],
            .num_sge = 2,
        };
    }
    if (count <= 0 || !ibv_post_recv(endpoint->queue_pair, requests, &bad))
        return count;
    return bad ? (int)(bad - requests) : 0;
}

/* Address of the sender: from an IPv6 header, or from the IPv4 header in the header's second half
 * (RoCE version 2, A17.4.5.1). */
static void read_sender(const uint8_t *header, uint8_t *gid) {
    if (header[0] >> 4 == 6) {
        memcpy(gid, header + 8, RDMA_GID_BYTES);
        return;
    }
    memset(gid, 0, 10);
    gid[10] = gid[11] = 0xff;
    memcpy(gid + 12, header + 20 + 12, 4);
}

int rdma_receive(struct rdma_endpoint *endpoint, struct rdma_received *received, int max) {
    struct ibv_wc ends[RDMA_BURST];
    int count = ibv_poll_cq(endpoint->received, max < RDMA_BURST ? max : RDMA_BURST, ends);
    for (int at = 0; at < count; at++) {
        const struct ibv_wc *end = &ends[at];
        struct rdma_received *to = &received[at];
        *to = (struct rdma_received){.offset = end->wr_id, .status = end->status};
        if (end->status != IBV_WC_SUCCESS)
            continue;
        to->bytes = end->byte_len < RDMA_HEADER_BYTES ? 0 : end->byte_len - RDMA_HEADER_BYTES;
        to->queue_pair = end->src_qp;
        if (end->wc_flags & IBV_WC_GRH)
            read_sender(endpoint->base + end->wr_id - RDMA_HEADER_BYTES, to->gid);
    }
    return count;
}

int rdma_send(struct rdma_endpoint *endpoint, const struct rdma_message *messages, int count) {
    struct ibv_send_wr requests[RDMA_BURST], *bad = NULL;
    struct ibv_sge parts[RDMA_BURST];
    if (count > RDMA_BURST)
        count = RDMA_BURST;
    for (int at = 0; at < count; at++) {
        const struct rdma_message *message = &messages[at];
        parts[at] = (struct ibv_sge){
            .addr = (uintptr_t)(endpoint->base + message->offset),
            .length = message->bytes,
            .lkey = endpoint->memory->lkey,
        };
        requests[at] = (struct ibv_send_wr){
            .wr_id = message->offset,
            .next = at + 1 < count ? &requests[at + 1] : NULL,
            .sg_list = &parts[at],
            .num_sge = 1,
            .opcode = IBV_WR_SEND,
            .wr.ud = {.ah = message->path ? message->path : endpoint->group,
                      .remote_qpn = message->path ? message->queue_pair : MULTICAST_QUEUE_PAIR,
                      .remote_qkey = QUEUE_KEY},
        };
    }
    if (count <= 0 || !ibv_post_send(endpoint->queue_pair, requests, &bad))
        return count;
    return bad ? (int)(bad - requests) : 0;
}

int rdma_reap(struct rdma_endpoint *endpoint, uint64_t *offsets, uint64_t *failed, int max) {
    struct ibv_wc ends[RDMA_BURST];
    int count = ibv_poll_cq(endpoint->sent, max < RDMA_BURST ? max : RDMA_BURST, ends);
    *failed = 0;
    for (int at = 0; at < count; at++) {
        offsets[at] = ends[at].wr_id;
        *failed |= (uint64_t)(ends[at].status != IBV_WC_SUCCESS) << at;
    }
    return count;
}

int rdma_arm(struct rdma_endpoint *endpoint) {
    struct ibv_cq *queue;
    void *context;
    /* Events of earlier calls. The channel does not wait. */
    while (!ibv_get_cq_event(endpoint->channel, &queue, &context))
        ibv_ack_cq_events(queue, 1);
    return ibv_req_notify_cq(endpoint->received, 0);
}

void *rdma_reach(struct rdma_endpoint *endpoint, const uint8_t *gid) {
    if (endpoint->path_count == MAX_PATHS)
        return NULL;
    struct ibv_ah *path = make_path(endpoint, gid);
    if (path)
        endpoint->paths[endpoint->path_count++] = path;
    return path;
}

void rdma_stop(struct rdma_endpoint *endpoint) {
    if (endpoint->queue_pair)
        ibv_destroy_qp(endpoint->queue_pair);
    endpoint->queue_pair = NULL;
}

void rdma_close(struct rdma_endpoint *endpoint) {
    rdma_stop(endpoint);
    for (size_t at = 0; at < endpoint->path_count; at++)
        ibv_destroy_ah(endpoint->paths[at]);
    if (endpoint->group)
        ibv_destroy_ah(endpoint->group);
    if (endpoint->sent)
        ibv_destroy_cq(endpoint->sent);
    if (endpoint->received)
        ibv_destroy_cq(endpoint->received);
    if (endpoint->channel)
        ibv_destroy_comp_channel(endpoint->channel);
    if (endpoint->rest)
        ibv_dereg_mr(endpoint->rest);
    if (endpoint->memory)
        ibv_dereg_mr(endpoint->memory);
    free(endpoint->rest_bytes);
    if (endpoint->domain)
        ibv_dealloc_pd(endpoint->domain);
    if (endpoint->context)
        ibv_close_device(endpoint->context);
    free(endpoint);
}
