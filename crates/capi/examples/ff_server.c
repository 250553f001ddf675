/*
 * HTTP server in the shape of F-Stack: a kqueue, or with the argument `epoll` an epoll set, in a
 * function that ff_run calls. With `mbuf` it has a kqueue, and fills its responses in messages of the
 * library.
 *
 *   ff_server PORT kqueue|epoll|mbuf --conf CONFIG
 */
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ff_api.h>
#include <ff_config.h>
#include <ff_epoll.h>
#include <ff_log.h>

#define MAX_EVENTS 512

static const char response[] = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
                               "Content-Length: 11\r\n\r\nhigh water\n";
static int queue, uses_epoll, uses_mbuf, listeners[2];
static volatile sig_atomic_t is_done;

static void fail(const char *what)
{
    ff_log(FF_LOG_ERR, FF_LOGTYPE_FSTACK_APP, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static void watch(int fd)
{
    if (uses_epoll) {
        struct epoll_event event;
        memset(&event, 0, sizeof event);
        event.events = EPOLLIN;
        event.data.fd = fd;
        if (ff_epoll_ctl(queue, EPOLL_CTL_ADD, fd, &event) < 0)
            fail("ff_epoll_ctl");
    } else {
        struct kevent change;
        EV_SET(&change, fd, EVFILT_READ, EV_ADD, 0, 0, NULL);
        if (ff_kevent(queue, &change, 1, NULL, 0, NULL) < 0)
            fail("ff_kevent");
    }
}

static void accept_all(int listener)
{
    int fd;
    while ((fd = ff_accept(listener, NULL, NULL)) >= 0)
        watch(fd);
    if (errno != EAGAIN)
        fail("ff_accept");
}

/* Sends the response in two pieces. */
static ssize_t send_message(int fd)
{
    struct ff_zc_mbuf message;
    int size = sizeof response - 1, body = 11;
    if (ff_zc_mbuf_get(&message, size) < 0
        || ff_zc_mbuf_write(&message, response, size - body) != size - body
        || ff_zc_mbuf_write(&message, response + size - body, body) != body)
        fail("ff_zc_mbuf");
    return ff_write(fd, message.bsd_mbuf, (size_t)size);
}

static ssize_t respond(int fd)
{
    return uses_mbuf ? send_message(fd) : ff_write(fd, response, sizeof response - 1);
}

static void answer(int fd)
{
    char request[2048];
    ssize_t got = ff_read(fd, request, sizeof request - 1);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        ff_close(fd);
        return;
    }
    request[got] = 0;
    if (strstr(request, "\r\n\r\n") && respond(fd) != (ssize_t)sizeof response - 1)
        ff_close(fd);
}

static void handle(int fd)
{
    if (fd == listeners[0] || fd == listeners[1])
        accept_all(fd);
    else
        answer(fd);
}

static int loop(void *argument)
{
    (void)argument;
    if (is_done)
        ff_stop_run();
    if (uses_epoll) {
        static struct epoll_event events[MAX_EVENTS];
        int count = ff_epoll_wait(queue, events, MAX_EVENTS, 0);
        for (int i = 0; i < count; i++)
            handle(events[i].data.fd);
        return count < 0 ? -1 : 0;
    } else {
        static struct kevent events[MAX_EVENTS];
        int count = ff_kevent(queue, NULL, 0, events, MAX_EVENTS, NULL);
        for (int i = 0; i < count; i++) {
            if ((events[i].flags & EV_EOF) && events[i].data == 0)
                ff_close((int)events[i].ident);
            else
                handle((int)events[i].ident);
        }
        return count < 0 ? -1 : 0;
    }
}

static int open_listener(int domain, int port)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    int is_v6 = domain == AF_INET6, on = 1;
    int fd = ff_socket(domain, SOCK_STREAM, 0);
    if (fd < 0)
        fail("ff_socket");
    if (ff_ioctl(fd, FIONBIO, &on) < 0)
        fail("FIONBIO");
    if (is_v6 && ff_setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on) < 0)
        fail("IPV6_V6ONLY");
    memset(&v4, 0, sizeof v4);
    memset(&v6, 0, sizeof v6);
    v4.sin_family = AF_INET;
    v6.sin6_family = AF_INET6;
    v4.sin_port = v6.sin6_port = htons((uint16_t)port);
    if (ff_bind(fd, is_v6 ? (struct linux_sockaddr *)&v6 : (struct linux_sockaddr *)&v4,
                is_v6 ? sizeof v6 : sizeof v4) < 0)
        fail("ff_bind");
    if (ff_listen(fd, MAX_EVENTS) < 0)
        fail("ff_listen");
    return fd;
}

static void on_signal(int signum)
{
    (void)signum;
    is_done = 1;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: ff_server PORT kqueue|epoll|mbuf --conf CONFIG\n");
        return 2;
    }
    if (ff_init(argc, argv) < 0)
        return 1;
    signal(SIGTERM, on_signal);
    uses_epoll = strcmp(argv[2], "epoll") == 0;
    uses_mbuf = strcmp(argv[2], "mbuf") == 0;
    queue = uses_epoll ? ff_epoll_create(MAX_EVENTS) : ff_kqueue();
    if (queue < 0)
        fail("queue");
    listeners[0] = open_listener(AF_INET, atoi(argv[1]));
    listeners[1] = open_listener(AF_INET6, atoi(argv[1]));
    watch(listeners[0]);
    watch(listeners[1]);
    ff_run(loop, NULL);
    printf("ended\n");
    return 0;
}
