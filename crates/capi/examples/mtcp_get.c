/*
 * HTTP client in the shape of mTCP: gets a path many times over connections at once.
 *
 *   mtcp_get -f CONFIG [-n REQUESTS] [-c CONNECTIONS] ADDRESS PORT PATH
 *
 * Each request has a connection of its own. Prints the number of whole responses and the bytes of
 * their bodies.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <mtcp_api.h>
#include <mtcp_epoll.h>

#define MAX_SOCKETS 10000
#define MAX_EVENTS 1000
#define HEAD_BYTES 4096

struct transfer {
    char head[HEAD_BYTES];
    size_t head_length;
    int has_head;
    size_t body_length;
    size_t announced;
};

static mctx_t mctx;
static int set;
static struct transfer transfers[MAX_SOCKETS];
static struct sockaddr_storage peer;
static socklen_t peer_length;
static char request[1024];
static int started, ended, whole;
static size_t body_bytes;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void watch(int operation, int sockid, uint32_t events)
{
    struct mtcp_epoll_event event;
    memset(&event, 0, sizeof event);
    event.events = events;
    event.data.sockid = sockid;
    if (mtcp_epoll_ctl(mctx, set, operation, sockid, &event) < 0)
        fail("mtcp_epoll_ctl");
}

static void start(void)
{
    int sockid = mtcp_socket(mctx, peer.ss_family, SOCK_STREAM, 0);
    if (sockid < 0 || sockid >= MAX_SOCKETS)
        fail("mtcp_socket");
    memset(&transfers[sockid], 0, sizeof transfers[sockid]);
    if (mtcp_setsock_nonblock(mctx, sockid) < 0)
        fail("mtcp_setsock_nonblock");
    if (mtcp_connect(mctx, sockid, (struct sockaddr *)&peer, peer_length) < 0
        && errno != EINPROGRESS)
        fail("mtcp_connect");
    watch(MTCP_EPOLL_CTL_ADD, sockid, MTCP_EPOLLOUT);
    started++;
}

static void end(int sockid)
{
    struct transfer *transfer = &transfers[sockid];
    if (transfer->has_head && transfer->body_length == transfer->announced)
        whole++;
    body_bytes += transfer->body_length;
    mtcp_epoll_ctl(mctx, set, MTCP_EPOLL_CTL_DEL, sockid, NULL);
    mtcp_close(mctx, sockid);
    ended++;
}

static void take(struct transfer *transfer, const char *data, size_t length)
{
    size_t space;
    char *body, *field;
    if (transfer->has_head) {
        transfer->body_length += length;
        return;
    }
    space = HEAD_BYTES - 1 - transfer->head_length;
    if (length > space)
        length = space;
    memcpy(transfer->head + transfer->head_length, data, length);
    transfer->head_length += length;
    body = strstr(transfer->head, "\r\n\r\n");
    field = strstr(transfer->head, "Content-Length: ");
    if (!body || !field)
        return;
    transfer->has_head = 1;
    transfer->announced = (size_t)atol(field + strlen("Content-Length: "));
    transfer->body_length = transfer->head_length - (size_t)(body + 4 - transfer->head);
}

static void receive(int sockid)
{
    char buffer[HEAD_BYTES / 2];
    ssize_t got;
    while ((got = mtcp_read(mctx, sockid, buffer, sizeof buffer)) > 0)
        take(&transfers[sockid], buffer, (size_t)got);
    if (got == 0 || errno != EAGAIN)
        end(sockid);
}

static void handle(const struct mtcp_epoll_event *event)
{
    int sockid = event->data.sockid;
    if (event->events & MTCP_EPOLLERR) {
        int error = 0;
        socklen_t length = sizeof error;
        mtcp_getsockopt(mctx, sockid, SOL_SOCKET, SO_ERROR, &error, &length);
        fprintf(stderr, "socket %d: %s\n", sockid, strerror(error));
        end(sockid);
    } else if (event->events & MTCP_EPOLLIN) {
        receive(sockid);
    } else if (event->events & MTCP_EPOLLOUT) {
        ssize_t length = (ssize_t)strlen(request);
        if (mtcp_write(mctx, sockid, request, (size_t)length) != length)
            fail("mtcp_write");
        watch(MTCP_EPOLL_CTL_MOD, sockid, MTCP_EPOLLIN);
    }
}

static void set_peer(const char *text, int port)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)&peer;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&peer;
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
        peer_length = sizeof *v4;
    } else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons((uint16_t)port);
        peer_length = sizeof *v6;
    } else {
        fprintf(stderr, "%s is no address\n", text);
        exit(2);
    }
}

int main(int argc, char **argv)
{
    static struct mtcp_epoll_event events[MAX_EVENTS];
    const char *config = NULL;
    int requests = 1, connections = 1, option;
    struct mtcp_conf conf;
    while ((option = getopt(argc, argv, "f:n:c:")) != -1) {
        switch (option) {
        case 'f': config = optarg; break;
        case 'n': requests = atoi(optarg); break;
        case 'c': connections = atoi(optarg); break;
        default: return 2;
        }
    }
    if (!config || argc - optind != 3) {
        fprintf(stderr, "usage: mtcp_get -f CONFIG [-n REQUESTS] [-c CONNECTIONS] ADDRESS PORT PATH\n");
        return 2;
    }
    set_peer(argv[optind], atoi(argv[optind + 1]));
    snprintf(request, sizeof request,
             "GET %s HTTP/1.0\r\nHost: %s\r\nConnection: close\r\n\r\n", argv[optind + 2],
             argv[optind]);
    mtcp_getconf(&conf);
    conf.num_cores = 1;
    mtcp_setconf(&conf);
    if (mtcp_init(config) < 0)
        return 1;
    mctx = mtcp_create_context(0);
    if (!mctx)
        fail("mtcp_create_context");
    if (mtcp_init_rss(mctx, INADDR_ANY, 1, 0, 0) < 0)
        fail("mtcp_init_rss");
    set = mtcp_epoll_create(mctx, MAX_EVENTS);
    if (set < 0)
        fail("mtcp_epoll_create");
    while (ended < requests) {
        int count;
        while (started < requests && started - ended < connections)
            start();
        count = mtcp_epoll_wait(mctx, set, events, MAX_EVENTS, -1);
        if (count < 0)
            fail("mtcp_epoll_wait");
        for (int i = 0; i < count; i++)
            handle(&events[i]);
    }
    printf("%d responses, %zu bytes\n", whole, body_bytes);
    mtcp_destroy_context(mctx);
    mtcp_destroy();
    return whole == requests ? 0 : 1;
}
