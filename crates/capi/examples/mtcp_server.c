/*
 * HTTP server in the shape of mTCP: a context, an epoll set and a listener for each core.
 *
 *   mtcp_server -f CONFIG [-N CORES] [-P PORT] [-s BODY_BYTES]
 *
 * Each request is answered with a body of BODY_BYTES bytes, on a connection that stays open unless
 * the client asks otherwise. SIGINT and SIGTERM end the server.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <mtcp_api.h>
#include <mtcp_epoll.h>

#define MAX_CORES 16
#define MAX_SOCKETS 10000
#define MAX_EVENTS 1000
#define REQUEST_BYTES 2048

struct connection {
    char request[REQUEST_BYTES];
    size_t request_length;
    size_t unsent; /* bytes of the responses that wait for space */
    int closes;    /* closed after the response */
};

struct server {
    int core;
    mctx_t mctx;
    int set;
    struct connection *connections;
};

static char *response;
static size_t response_length;
static int port = 80;
static int core_count = 1;
static pthread_t threads[MAX_CORES];
static volatile sig_atomic_t is_done[MAX_CORES];

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void watch(struct server *server, int operation, int sockid, uint32_t events)
{
    struct mtcp_epoll_event event;
    memset(&event, 0, sizeof event);
    event.events = events;
    event.data.sockid = sockid;
    if (mtcp_epoll_ctl(server->mctx, server->set, operation, sockid, &event) < 0)
        fail("mtcp_epoll_ctl");
}

static int open_listener(struct server *server, int domain)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    int is_v6 = domain == AF_INET6, on = 1;
    int listener = mtcp_socket(server->mctx, domain, SOCK_STREAM, 0);
    if (listener < 0)
        fail("mtcp_socket");
    if (mtcp_setsock_nonblock(server->mctx, listener) < 0)
        fail("mtcp_setsock_nonblock");
    if (is_v6 && mtcp_setsockopt(server->mctx, listener, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on))
        fail("mtcp_setsockopt");
    memset(&v4, 0, sizeof v4);
    memset(&v6, 0, sizeof v6);
    v4.sin_family = AF_INET;
    v6.sin6_family = AF_INET6;
    v4.sin_port = v6.sin6_port = htons((uint16_t)port);
    if (mtcp_bind(server->mctx, listener, is_v6 ? (struct sockaddr *)&v6 : (struct sockaddr *)&v4,
                  is_v6 ? sizeof v6 : sizeof v4) < 0)
        fail("mtcp_bind");
    if (mtcp_listen(server->mctx, listener, 4096) < 0)
        fail("mtcp_listen");
    watch(server, MTCP_EPOLL_CTL_ADD, listener, MTCP_EPOLLIN);
    return listener;
}

static void close_connection(struct server *server, int sockid)
{
    mtcp_epoll_ctl(server->mctx, server->set, MTCP_EPOLL_CTL_DEL, sockid, NULL);
    mtcp_close(server->mctx, sockid);
}

static void accept_all(struct server *server, int listener)
{
    int sockid;
    while ((sockid = mtcp_accept(server->mctx, listener, NULL, NULL)) >= 0) {
        if (sockid >= MAX_SOCKETS) {
            mtcp_abort(server->mctx, sockid);
            continue;
        }
        memset(&server->connections[sockid], 0, sizeof server->connections[sockid]);
        mtcp_setsock_nonblock(server->mctx, sockid);
        watch(server, MTCP_EPOLL_CTL_ADD, sockid, MTCP_EPOLLIN);
    }
    if (errno != EAGAIN)
        perror("mtcp_accept");
}

/* Sends what waits, as far as there is space. Returns 0 if the connection was closed. */
static int send_waiting(struct server *server, int sockid)
{
    struct connection *connection = &server->connections[sockid];
    while (connection->unsent > 0) {
        size_t chunk = (connection->unsent - 1) % response_length + 1;
        ssize_t sent = mtcp_write(server->mctx, sockid, response + response_length - chunk, chunk);
        if (sent < 0 && errno == EAGAIN) {
            watch(server, MTCP_EPOLL_CTL_MOD, sockid, MTCP_EPOLLIN | MTCP_EPOLLOUT);
            return 1;
        }
        if (sent < 0) {
            close_connection(server, sockid);
            return 0;
        }
        connection->unsent -= (size_t)sent;
    }
    if (connection->closes) {
        close_connection(server, sockid);
        return 0;
    }
    return 1;
}

static void read_requests(struct server *server, int sockid)
{
    struct connection *connection = &server->connections[sockid];
    for (;;) {
        char *end;
        size_t space = REQUEST_BYTES - 1 - connection->request_length;
        ssize_t got = mtcp_read(server->mctx, sockid,
                                connection->request + connection->request_length, space);
        if (got < 0 && errno == EAGAIN)
            return;
        if (got <= 0) {
            close_connection(server, sockid);
            return;
        }
        connection->request_length += (size_t)got;
        connection->request[connection->request_length] = 0;
        while ((end = strstr(connection->request, "\r\n\r\n")) != NULL) {
            *end = 0;
            connection->closes |= strstr(connection->request, "Connection: close") != NULL
                || strstr(connection->request, " HTTP/1.0") != NULL;
            end += 4;
            connection->request_length -= (size_t)(end - connection->request);
            memmove(connection->request, end, connection->request_length + 1);
            connection->unsent += response_length;
        }
        if (!send_waiting(server, sockid))
            return;
        if (connection->request_length == REQUEST_BYTES - 1) {
            close_connection(server, sockid);
            return;
        }
    }
}

static void handle(struct server *server, const struct mtcp_epoll_event *event)
{
    int sockid = event->data.sockid;
    if (event->events & MTCP_EPOLLERR) {
        int error = 0;
        socklen_t length = sizeof error;
        mtcp_getsockopt(server->mctx, sockid, SOL_SOCKET, SO_ERROR, &error, &length);
        close_connection(server, sockid);
        return;
    }
    if (event->events & MTCP_EPOLLOUT) {
        if (!send_waiting(server, sockid))
            return;
        if (server->connections[sockid].unsent == 0)
            watch(server, MTCP_EPOLL_CTL_MOD, sockid, MTCP_EPOLLIN);
    }
    if (event->events & MTCP_EPOLLIN)
        read_requests(server, sockid);
}

static void *run(void *argument)
{
    struct server *server = (struct server *)argument;
    static struct mtcp_epoll_event all[MAX_CORES][MAX_EVENTS];
    struct mtcp_epoll_event *events = all[server->core];
    int listeners[2];
    mtcp_core_affinitize(server->core);
    server->mctx = mtcp_create_context(server->core);
    if (!server->mctx)
        fail("mtcp_create_context");
    server->set = mtcp_epoll_create(server->mctx, MAX_EVENTS);
    if (server->set < 0)
        fail("mtcp_epoll_create");
    listeners[0] = open_listener(server, AF_INET);
    listeners[1] = open_listener(server, AF_INET6);
    while (!is_done[server->core]) {
        int count = mtcp_epoll_wait(server->mctx, server->set, events, MAX_EVENTS, -1);
        if (count < 0 && errno != EINTR)
            fail("mtcp_epoll_wait");
        for (int i = 0; i < count; i++) {
            int sockid = events[i].data.sockid;
            if (sockid == listeners[0] || sockid == listeners[1])
                accept_all(server, sockid);
            else
                handle(server, &events[i]);
        }
    }
    mtcp_close(server->mctx, server->set);
    mtcp_destroy_context(server->mctx);
    return NULL;
}

static void on_signal(int signum)
{
    for (int i = 0; i < core_count; i++) {
        if (pthread_equal(threads[i], pthread_self()))
            is_done[i] = 1;
        else if (!is_done[i])
            pthread_kill(threads[i], signum);
    }
}

static void make_response(size_t body_length)
{
    int head;
    response = (char *)malloc(body_length + 256);
    if (!response)
        fail("malloc");
    head = snprintf(response, 256, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
                    "Content-Length: %zu\r\n\r\n", body_length);
    for (size_t i = 0; i < body_length; i++)
        response[(size_t)head + i] = (char)('a' + i % 26);
    response_length = (size_t)head + body_length;
}

int main(int argc, char **argv)
{
    static struct server servers[MAX_CORES];
    const char *config = NULL;
    struct mtcp_conf conf;
    size_t body_length = 64;
    int option;
    while ((option = getopt(argc, argv, "f:N:P:s:")) != -1) {
        switch (option) {
        case 'f': config = optarg; break;
        case 'N': core_count = atoi(optarg); break;
        case 'P': port = atoi(optarg); break;
        case 's': body_length = (size_t)atol(optarg); break;
        default: return 2;
        }
    }
    if (!config || core_count < 1 || core_count > MAX_CORES) {
        fprintf(stderr, "usage: mtcp_server -f CONFIG [-N CORES] [-P PORT] [-s BODY_BYTES]\n");
        return 2;
    }
    make_response(body_length);
    /* The number of cores counts before mtcp_init. */
    mtcp_getconf(&conf);
    conf.num_cores = core_count;
    mtcp_setconf(&conf);
    if (mtcp_init(config) < 0)
        return 1;
    mtcp_getconf(&conf);
    core_count = conf.num_cores < MAX_CORES ? conf.num_cores : MAX_CORES;
    mtcp_register_signal(SIGINT, on_signal);
    mtcp_register_signal(SIGTERM, on_signal);
    for (int i = 0; i < core_count; i++) {
        servers[i].core = i;
        servers[i].connections =
            (struct connection *)calloc(MAX_SOCKETS, sizeof(struct connection));
        if (!servers[i].connections || pthread_create(&threads[i], NULL, run, &servers[i]))
            fail("pthread_create");
    }
    for (int i = 0; i < core_count; i++)
        pthread_join(threads[i], NULL);
    mtcp_destroy();
    printf("ended\n");
    return 0;
}
