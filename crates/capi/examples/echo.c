/*
 * Echo server for UDP and TCP on IPv4 and IPv6, and a client for it.
 *
 *   echo serve PORT                serves until it is killed
 *   echo call ADDRESS PORT         sends over TCP and UDP, and checks what comes back
 *
 * Built with -DKERNEL the program uses the kernel's sockets: the calls are the same.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#ifdef KERNEL
#define tg_socket socket
#define tg_bind bind
#define tg_listen listen
#define tg_accept4 accept4
#define tg_connect connect
#define tg_recv recv
#define tg_recvfrom recvfrom
#define tg_send send
#define tg_sendto sendto
#define tg_shutdown shutdown
#define tg_close close
#define tg_setsockopt setsockopt
#define tg_epoll_create1 epoll_create1
#define tg_epoll_ctl epoll_ctl
#define tg_epoll_wait epoll_wait
#else
#include <tidegate.h>
#endif

#define BUFFER_BYTES 65536
#define TRANSFER_BYTES 3000000

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static socklen_t make_address(const char *text, int port, struct sockaddr_storage *address)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)address;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address;
    memset(address, 0, sizeof *address);
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
        return sizeof *v4;
    }
    if (inet_pton(AF_INET6, text, &v6->sin6_addr) != 1) {
        fprintf(stderr, "%s is no address\n", text);
        exit(1);
    }
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)port);
    return sizeof *v6;
}

static void watch(int set, int fd)
{
    struct epoll_event event;
    memset(&event, 0, sizeof event);
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (tg_epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) < 0)
        fail("epoll_ctl");
}

/* Socket bound to a port of one family; a TCP socket listens. */
static int open_server(int domain, int type, int port)
{
    struct sockaddr_storage address;
    socklen_t length = make_address(domain == AF_INET ? "0.0.0.0" : "::", port, &address);
    int on = 1;
    int fd = tg_socket(domain, type | SOCK_NONBLOCK, 0);
    if (fd < 0)
        fail("socket");
    if (domain == AF_INET6 && tg_setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on) < 0)
        fail("IPV6_V6ONLY");
    if (tg_setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) < 0)
        fail("SO_REUSEADDR");
    if (tg_bind(fd, (struct sockaddr *)&address, length) < 0)
        fail("bind");
    if (type == SOCK_STREAM && tg_listen(fd, 128) < 0)
        fail("listen");
    return fd;
}

static void accept_all(int set, int listener)
{
    int fd;
    /* Blocking: what has arrived is sent back completely before the next event. */
    while ((fd = tg_accept4(listener, NULL, NULL, 0)) >= 0)
        watch(set, fd);
    if (errno != EAGAIN)
        fail("accept");
}

static void echo_datagrams(int fd)
{
    static char buffer[BUFFER_BYTES];
    struct sockaddr_storage from;
    socklen_t length = sizeof from;
    ssize_t got;
    while ((got = tg_recvfrom(fd, buffer, sizeof buffer, 0, (struct sockaddr *)&from, &length)) >= 0) {
        if (tg_sendto(fd, buffer, (size_t)got, 0, (struct sockaddr *)&from, length) != got)
            fail("sendto");
        length = sizeof from;
    }
    if (errno != EAGAIN)
        fail("recvfrom");
}

static void echo_stream(int fd)
{
    static char buffer[BUFFER_BYTES];
    ssize_t got = tg_recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0 || tg_send(fd, buffer, (size_t)got, MSG_NOSIGNAL) != got)
        tg_close(fd);
}

static void serve(int port)
{
    struct epoll_event events[64];
    int fds[4], set = tg_epoll_create1(0);
    if (set < 0)
        fail("epoll_create1");
    for (int i = 0; i < 4; i++) {
        fds[i] = open_server(i & 1 ? AF_INET6 : AF_INET, i & 2 ? SOCK_DGRAM : SOCK_STREAM, port);
        watch(set, fds[i]);
    }
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int count = tg_epoll_wait(set, events, 64, -1);
        if (count < 0)
            fail("epoll_wait");
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == fds[0] || fd == fds[1])
                accept_all(set, fd);
            else if (fd == fds[2] || fd == fds[3])
                echo_datagrams(fd);
            else
                echo_stream(fd);
        }
    }
}

static unsigned char byte(size_t at)
{
    return (unsigned char)(at % 251);
}

/* Sends as much as there is space for, and receives what has come back, until all is there. */
static void call_tcp(const struct sockaddr *address, socklen_t length)
{
    static unsigned char data[TRANSFER_BYTES], back[BUFFER_BYTES];
    size_t sent = 0, received = 0;
    int fd = tg_socket(address->sa_family, SOCK_STREAM, 0);
    if (fd < 0)
        fail("socket");
    if (tg_connect(fd, address, length) < 0)
        fail("connect");
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = byte(i);
    while (received < sizeof data) {
        ssize_t count = 0;
        if (sent < sizeof data) {
            count = tg_send(fd, data + sent, sizeof data - sent, MSG_DONTWAIT);
            if (count < 0 && errno != EAGAIN)
                fail("send");
            if (count > 0)
                sent += (size_t)count;
            if (sent == sizeof data && tg_shutdown(fd, SHUT_WR) < 0)
                fail("shutdown");
        }
        /* With nothing to send there is something to wait for. */
        count = tg_recv(fd, back, sizeof back, count > 0 && sent < sizeof data ? MSG_DONTWAIT : 0);
        if (count < 0 && errno == EAGAIN)
            continue;
        if (count <= 0)
            fail("recv");
        for (ssize_t i = 0; i < count; i++) {
            if (back[i] != byte(received++)) {
                fprintf(stderr, "byte %zu differs\n", received - 1);
                exit(1);
            }
        }
    }
    if (tg_recv(fd, back, sizeof back, 0) != 0)
        fail("end of stream");
    if (tg_close(fd) < 0)
        fail("close");
}

static void call_udp(const struct sockaddr *address, socklen_t length)
{
    char question[] = "high water", answer[64];
    struct timeval limit = {1, 0};
    int fd = tg_socket(address->sa_family, SOCK_DGRAM, 0);
    if (fd < 0 || tg_setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) < 0)
        fail("socket");
    if (tg_connect(fd, address, length) < 0)
        fail("connect");
    /* A datagram may be lost. */
    for (int attempt = 0; attempt < 20; attempt++) {
        if (tg_send(fd, question, sizeof question, 0) != sizeof question)
            fail("send");
        ssize_t got = tg_recv(fd, answer, sizeof answer, 0);
        if (got == sizeof question && memcmp(question, answer, sizeof question) == 0) {
            tg_close(fd);
            return;
        }
        if (got >= 0 || errno != EAGAIN)
            fail("recv");
    }
    fprintf(stderr, "no answer\n");
    exit(1);
}

int main(int argc, char **argv)
{
    struct sockaddr_storage address;
    if (argc == 3 && strcmp(argv[1], "serve") == 0) {
        serve(atoi(argv[2]));
    } else if (argc == 4 && strcmp(argv[1], "call") == 0) {
        socklen_t length = make_address(argv[2], atoi(argv[3]), &address);
        call_tcp((struct sockaddr *)&address, length);
        call_udp((struct sockaddr *)&address, length);
        printf("echoed\n");
    } else {
        fprintf(stderr, "usage: echo serve PORT | call ADDRESS PORT\n");
        return 2;
    }
    return 0;
}
