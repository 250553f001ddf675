/*
 * Calls with their results and errors, one a line. Built with -DKERNEL the program uses the kernel's
 * sockets: the lines must be the same.
 *
 *   calls ADDRESS PEER PORT
 *
 * ADDRESS is of the stack; at PEER and PORT an echo server answers TCP and UDP.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef KERNEL
#define tg_socket socket
#define tg_bind bind
#define tg_listen listen
#define tg_accept accept
#define tg_accept4 accept4
#define tg_connect connect
#define tg_recv recv
#define tg_recvfrom recvfrom
#define tg_recvmsg recvmsg
#define tg_recvmmsg recvmmsg
#define tg_read read
#define tg_readv readv
#define tg_send send
#define tg_sendto sendto
#define tg_sendmsg sendmsg
#define tg_sendmmsg sendmmsg
#define tg_write write
#define tg_writev writev
#define tg_shutdown shutdown
#define tg_close close
#define tg_setsockopt setsockopt
#define tg_getsockopt getsockopt
#define tg_getsockname getsockname
#define tg_getpeername getpeername
#define tg_fcntl fcntl
#define tg_ioctl ioctl
#define tg_epoll_create1 epoll_create1
#define tg_epoll_ctl epoll_ctl
#define tg_epoll_wait epoll_wait
#define tg_poll poll
#define tg_select select
#define ff_dup dup
#define ff_dup2 dup2
#else
#include <tidegate.h>
/* Declared here: the header redefines the type of addresses. */
int ff_dup(int oldfd);
int ff_dup2(int oldfd, int newfd);
#endif

static struct sockaddr_storage own, peer;
static socklen_t length;
static int family;
/* Known at run time only: compilers warn of the constants. */
static void *volatile none = NULL;
static volatile int minus_one = -1;

#define SHOW(call)                                                                                 \
    do {                                                                                           \
        errno = 0;                                                                                 \
        long result = (long)(call);                                                                \
        printf("%s = %ld %s\n", #call, result, result < 0 ? strerrorname_np(errno) : "");          \
    } while (0)

/* Shows the call, whose result is a new descriptor, without its number. */
#define OPEN(variable, call)                                                                       \
    do {                                                                                           \
        errno = 0;                                                                                 \
        variable = (call);                                                                         \
        printf("%s %s\n", #call, variable < 0 ? strerrorname_np(errno) : "opens");                 \
    } while (0)

static void make_address(const char *text, int port, struct sockaddr_storage *address)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)address;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address;
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
        length = sizeof *v4;
    } else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons((uint16_t)port);
        length = sizeof *v6;
    } else {
        exit(2);
    }
    family = address->ss_family;
}

static struct sockaddr *at(struct sockaddr_storage *address)
{
    return (struct sockaddr *)address;
}

static void show_port(const char *what, const struct sockaddr_storage *address)
{
    /* The port has the same offset in both families. */
    int port = ntohs(((const struct sockaddr_in *)address)->sin_port);
    printf("%s: family %d, port %s\n", what, address->ss_family, port ? "set" : "0");
}

static void arguments(void)
{
    char byte = 0;
    int number = 0, fd;
    socklen_t size = sizeof number;
    struct sockaddr_storage other = own;
    printf("-- arguments\n");
    SHOW(tg_socket(AF_INET, 77, 0));
    SHOW(tg_socket(AF_INET, SOCK_STREAM, IPPROTO_UDP));
    SHOW(tg_socket(AF_INET, SOCK_DGRAM, IPPROTO_TCP));
    SHOW(tg_socket(-1, SOCK_STREAM, 0));
    SHOW(tg_recv(-1, &byte, 1, 0));
    SHOW(tg_send(9999, &byte, 1, 0));
    SHOW(tg_close(9999));
    SHOW(tg_bind(9999, at(&own), length));
    SHOW(tg_listen(9999, 1));
    SHOW(tg_accept(9999, NULL, NULL));
    SHOW(tg_setsockopt(9999, SOL_SOCKET, SO_REUSEADDR, &number, sizeof number));
    SHOW(tg_epoll_wait(9999, (struct epoll_event *)none, 1, 0));
    OPEN(fd, tg_socket(family, SOCK_STREAM, 0));
    SHOW(tg_bind(fd, NULL, length));
    SHOW(tg_bind(fd, at(&own), 3));
    other.ss_family = AF_UNIX;
    SHOW(tg_connect(fd, NULL, length));
    SHOW(tg_accept(fd, NULL, NULL));
    SHOW(tg_recv(fd, &byte, 1, 0));
    SHOW(tg_send(fd, &byte, 1, MSG_NOSIGNAL));
    SHOW(tg_shutdown(fd, SHUT_RDWR));
    SHOW(tg_getsockopt(fd, SOL_SOCKET, SO_TYPE, NULL, &size));
    SHOW(tg_getsockopt(fd, SOL_SOCKET, SO_TYPE, &number, NULL));
    SHOW(tg_setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, NULL, sizeof number));
    SHOW(tg_setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &number, 1));
    SHOW(tg_setsockopt(fd, SOL_SOCKET, 9999, &number, sizeof number));
    SHOW(tg_setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &number, sizeof number));
    SHOW(tg_setsockopt(fd, 4711, 1, &number, sizeof number));
    SHOW(tg_getpeername(fd, at(&other), &size));
    SHOW(tg_ioctl(fd, 0x1234567, &number));
    SHOW(tg_fcntl(fd, F_GETFL, 0) & O_NONBLOCK);
    SHOW(tg_fcntl(fd, F_SETFL, O_NONBLOCK));
    SHOW((tg_fcntl(fd, F_GETFL, 0) & O_NONBLOCK) != 0);
    SHOW(tg_close(fd));
    SHOW(tg_close(fd));
}

static void show_option(int fd, const char *name, int level, int option)
{
    int value = -1;
    socklen_t size = sizeof value;
    int result = tg_getsockopt(fd, level, option, &value, &size);
    printf("%s: %d %d, %u bytes\n", name, result, value, (unsigned)size);
}

static void set_option(int fd, const char *name, int level, int option, int value)
{
    int result = tg_setsockopt(fd, level, option, &value, sizeof value);
    printf("%s = %d: %d %s\n", name, value, result, result ? strerrorname_np(errno) : "");
    show_option(fd, name, level, option);
}

static void options(void)
{
    struct timeval limit = {1, 500000}, read_back = {0, 0};
    struct linger linger = {1, 3}, linger_back = {0, 0};
    socklen_t size = sizeof read_back;
    char name[16];
    int tcp, udp;
    printf("-- options\n");
    OPEN(tcp, tg_socket(family, SOCK_STREAM, 0));
    OPEN(udp, tg_socket(family, SOCK_DGRAM, 0));
    show_option(tcp, "SO_TYPE", SOL_SOCKET, SO_TYPE);
    show_option(udp, "SO_TYPE", SOL_SOCKET, SO_TYPE);
    show_option(udp, "SO_PROTOCOL", SOL_SOCKET, SO_PROTOCOL);
    show_option(udp, "SO_DOMAIN", SOL_SOCKET, SO_DOMAIN);
    show_option(tcp, "SO_ACCEPTCONN", SOL_SOCKET, SO_ACCEPTCONN);
    show_option(tcp, "SO_ERROR", SOL_SOCKET, SO_ERROR);
    set_option(tcp, "SO_REUSEADDR", SOL_SOCKET, SO_REUSEADDR, 1);
    set_option(tcp, "SO_REUSEPORT", SOL_SOCKET, SO_REUSEPORT, 1);
    set_option(tcp, "SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE, 5);
    set_option(tcp, "SO_SNDBUF", SOL_SOCKET, SO_SNDBUF, 100000);
    set_option(tcp, "SO_RCVBUF", SOL_SOCKET, SO_RCVBUF, 100000);
    set_option(tcp, "SO_SNDBUF", SOL_SOCKET, SO_SNDBUF, 1);
    set_option(tcp, "SO_RCVBUF", SOL_SOCKET, SO_RCVBUF, 1);
    set_option(udp, "SO_BROADCAST", SOL_SOCKET, SO_BROADCAST, 1);
    set_option(tcp, "TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(tcp, "TCP_CORK", IPPROTO_TCP, TCP_CORK, 1);
    set_option(tcp, "TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE, 77);
    set_option(tcp, "TCP_KEEPINTVL", IPPROTO_TCP, TCP_KEEPINTVL, 7);
    set_option(tcp, "TCP_KEEPCNT", IPPROTO_TCP, TCP_KEEPCNT, 3);
    set_option(tcp, "TCP_KEEPCNT", IPPROTO_TCP, TCP_KEEPCNT, 1000);
    set_option(tcp, "TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT, 5000);
    set_option(udp, "TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 1);
    if (family == AF_INET) {
        set_option(tcp, "IP_TTL", IPPROTO_IP, IP_TTL, 33);
        set_option(tcp, "IP_TTL", IPPROTO_IP, IP_TTL, 0);
        set_option(udp, "IP_TOS", IPPROTO_IP, IP_TOS, 0x20);
        set_option(udp, "IP_PKTINFO", IPPROTO_IP, IP_PKTINFO, 1);
    } else {
        set_option(tcp, "IPV6_V6ONLY", IPPROTO_IPV6, IPV6_V6ONLY, 1);
        set_option(tcp, "IPV6_UNICAST_HOPS", IPPROTO_IPV6, IPV6_UNICAST_HOPS, 33);
        set_option(tcp, "IPV6_UNICAST_HOPS", IPPROTO_IPV6, IPV6_UNICAST_HOPS, 300);
        set_option(udp, "IPV6_RECVPKTINFO", IPPROTO_IPV6, IPV6_RECVPKTINFO, 1);
    }
    SHOW(tg_setsockopt(tcp, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    SHOW(tg_getsockopt(tcp, SOL_SOCKET, SO_RCVTIMEO, &read_back, &size));
    printf("%ld s %ld us\n", (long)read_back.tv_sec, (long)read_back.tv_usec);
    limit.tv_usec = 1000000;
    SHOW(tg_setsockopt(tcp, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
    SHOW(tg_setsockopt(tcp, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    size = sizeof linger_back;
    SHOW(tg_getsockopt(tcp, SOL_SOCKET, SO_LINGER, &linger_back, &size));
    printf("linger %d %d\n", linger_back.l_onoff, linger_back.l_linger);
    SHOW(tg_setsockopt(tcp, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5));
    size = sizeof name;
    SHOW(tg_getsockopt(tcp, IPPROTO_TCP, TCP_CONGESTION, name, &size));
    printf("%s\n", name);
    SHOW(tg_setsockopt(tcp, IPPROTO_TCP, TCP_CONGESTION, "none", 4));
    SHOW(tg_close(tcp));
    SHOW(tg_close(udp));
}

static void addresses(void)
{
    struct sockaddr_storage wanted = own, name, foreign;
    socklen_t size = sizeof name;
    int fd, other, on = 1;
    printf("-- addresses\n");
    OPEN(fd, tg_socket(family, SOCK_STREAM, 0));
    SHOW(tg_getsockname(fd, at(&name), &size));
    show_port("new", &name);
    SHOW(tg_bind(fd, at(&wanted), length));
    SHOW(tg_bind(fd, at(&wanted), length));
    size = sizeof name;
    SHOW(tg_getsockname(fd, at(&name), &size));
    show_port("bound", &name);
    printf("%u bytes\n", (unsigned)size);
    SHOW(tg_listen(fd, 5));
    show_option(fd, "SO_ACCEPTCONN", SOL_SOCKET, SO_ACCEPTCONN);
    OPEN(other, tg_socket(family, SOCK_STREAM, 0));
    SHOW(tg_bind(other, at(&name), size));
    SHOW(tg_connect(fd, at(&peer), length));
    SHOW(tg_recv(fd, &on, 1, 0));
    SHOW(tg_fcntl(fd, F_SETFL, O_NONBLOCK));
    SHOW(tg_accept(fd, NULL, NULL));
    SHOW(tg_close(other));
    SHOW(tg_close(fd));
    memset(&foreign, 0, sizeof foreign);
    make_address(family == AF_INET ? "203.0.113.9" : "2001:db8:ffff::9", 0, &foreign);
    OPEN(fd, tg_socket(family, SOCK_DGRAM, 0));
    SHOW(tg_bind(fd, at(&foreign), length));
    SHOW(tg_bind(fd, at(&wanted), length));
    SHOW(tg_bind(fd, at(&wanted), length));
    SHOW(tg_listen(fd, 1));
    SHOW(tg_accept(fd, NULL, NULL));
    SHOW(tg_send(fd, &on, 1, 0));
    SHOW(tg_close(fd));
}

static void streams(void)
{
    struct sockaddr_storage closed = peer, name;
    struct iovec parts[2];
    struct pollfd poller;
    struct epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLRDHUP, {.u64 = 42}}, found;
    socklen_t size = sizeof name;
    char buffer[64];
    int fd, set, number;
    printf("-- streams\n");
    ((struct sockaddr_in *)&closed)->sin_port = htons(9);
    OPEN(fd, tg_socket(family, SOCK_STREAM, 0));
    SHOW(tg_connect(fd, at(&closed), length));
    /* A second attempt on the same socket. */
    SHOW(tg_connect(fd, at(&peer), length));
    SHOW(tg_connect(fd, at(&peer), length));
    SHOW(tg_getpeername(fd, at(&name), &size));
    show_port("peer", &name);
    SHOW(tg_listen(fd, 1));
    SHOW(tg_recv(fd, buffer, sizeof buffer, MSG_DONTWAIT));
    SHOW(tg_send(fd, "high ", 5, MSG_MORE));
    parts[0].iov_base = "wat";
    parts[0].iov_len = 3;
    parts[1].iov_base = "er";
    parts[1].iov_len = 2;
    SHOW(tg_writev(fd, parts, 2));
    SHOW(tg_writev(fd, parts, minus_one));
    SHOW(tg_writev(fd, (struct iovec *)none, 2));
    SHOW(tg_recv(fd, buffer, 10, MSG_WAITALL | MSG_PEEK));
    OPEN(set, tg_epoll_create1(0));
    SHOW(tg_epoll_ctl(set, EPOLL_CTL_MOD, fd, &event));
    SHOW(tg_epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    SHOW(tg_epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    SHOW(tg_epoll_ctl(set, EPOLL_CTL_ADD, 9999, &event));
    SHOW(tg_epoll_ctl(set, EPOLL_CTL_ADD, fd, NULL));
    SHOW(tg_epoll_ctl(set, 99, fd, &event));
    SHOW(tg_epoll_ctl(fd, EPOLL_CTL_ADD, set, &event));
    SHOW(tg_epoll_wait(set, &found, 0, 0));
    SHOW(tg_epoll_wait(set, &found, 1, -1));
    printf("events %#x, data %d\n", (unsigned)found.events, (int)found.data.u64);
    SHOW(tg_recv(fd, buffer, 10, MSG_WAITALL));
    printf("%.10s\n", buffer);
    poller.fd = fd;
    poller.events = POLLIN | POLLOUT;
    SHOW(tg_poll(&poller, 1, 0));
    printf("events %#x\n", (unsigned)poller.revents);
    poller.events = POLLIN;
    SHOW(tg_poll(&poller, 1, 1));
    SHOW(tg_ioctl(fd, FIONREAD, &number));
    printf("%d bytes wait\n", number);
    SHOW(tg_shutdown(fd, 77));
    SHOW(tg_shutdown(fd, SHUT_WR));
    SHOW(tg_send(fd, "x", 1, MSG_NOSIGNAL));
    SHOW(tg_recv(fd, buffer, sizeof buffer, 0));
    SHOW(tg_recv(fd, buffer, sizeof buffer, 0));
    poller.events = POLLIN | POLLRDHUP;
    SHOW(tg_poll(&poller, 1, -1));
    printf("events %#x\n", (unsigned)poller.revents & (POLLIN | POLLRDHUP));
    SHOW(tg_epoll_ctl(set, EPOLL_CTL_DEL, fd, NULL));
    SHOW(tg_epoll_ctl(set, EPOLL_CTL_DEL, fd, NULL));
    SHOW(tg_close(set));
    SHOW(tg_close(fd));
}

static void nonblocking(void)
{
    struct pollfd poller;
    fd_set writable;
    int fd, error = -1;
    socklen_t size = sizeof error;
    struct timeval limit = {10, 0};
    printf("-- nonblocking\n");
    OPEN(fd, tg_socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0));
    SHOW(tg_connect(fd, at(&peer), length));
    FD_ZERO(&writable);
    FD_SET(fd, &writable);
    SHOW(tg_select(fd + 1, NULL, &writable, NULL, &limit));
    SHOW(FD_ISSET(fd, &writable) != 0);
    SHOW(tg_getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
    printf("error %d\n", error);
    SHOW(tg_close(fd));
    ((struct sockaddr_in *)&peer)->sin_port ^= htons(1);
    OPEN(fd, tg_socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0));
    SHOW(tg_connect(fd, at(&peer), length));
    poller.fd = fd;
    poller.events = POLLOUT;
    SHOW(tg_poll(&poller, 1, 10000));
    SHOW(tg_getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
    printf("error %s\n", strerrorname_np(error));
    SHOW(tg_close(fd));
    ((struct sockaddr_in *)&peer)->sin_port ^= htons(1);
}

static void datagrams(void)
{
    struct sockaddr_storage from;
    struct mmsghdr messages[3];
    struct iovec parts[3];
    char buffers[3][32], control[3][64];
    struct timeval limit = {0, 20000};
    struct sockaddr_storage nowhere = peer;
    socklen_t size = sizeof from;
    static char large[70000];
    int fd, on = 1, number = -1, got = 0;
    printf("-- datagrams\n");
    OPEN(fd, tg_socket(family, SOCK_DGRAM, 0));
    SHOW(tg_setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    SHOW(tg_recv(fd, buffers[0], 1, 0));
    SHOW(tg_recv(fd, buffers[0], 1, MSG_DONTWAIT));
    ((struct sockaddr_in *)&nowhere)->sin_port = 0;
    SHOW(tg_sendto(fd, "x", 1, 0, at(&nowhere), length));
    SHOW(tg_sendto(fd, large, sizeof large, 0, at(&peer), length));
    SHOW(tg_sendto(fd, "x", 1, 0, at(&peer), 3));
    SHOW(tg_connect(fd, at(&peer), length));
    SHOW(tg_getpeername(fd, at(&from), &size));
    show_port("peer", &from);
    limit.tv_sec = 10;
    SHOW(tg_setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    SHOW(tg_send(fd, "one datagram", 12, 0));
    SHOW(tg_recv(fd, buffers[0], 3, MSG_PEEK | MSG_TRUNC));
    SHOW(tg_ioctl(fd, FIONREAD, &number));
    printf("%d bytes wait\n", number);
    size = sizeof from;
    SHOW(tg_recvfrom(fd, buffers[0], 3, 0, at(&from), &size));
    show_port("sender", &from);
    SHOW(tg_recv(fd, buffers[0], 3, MSG_DONTWAIT));
    if (family == AF_INET)
        SHOW(tg_setsockopt(fd, IPPROTO_IP, IP_RECVTTL, &on, sizeof on));
    else
        SHOW(tg_setsockopt(fd, IPPROTO_IPV6, IPV6_RECVHOPLIMIT, &on, sizeof on));
    memset(messages, 0, sizeof messages);
    for (int i = 0; i < 3; i++) {
        snprintf(buffers[i], sizeof buffers[i], "message %d", i);
        parts[i].iov_base = buffers[i];
        parts[i].iov_len = strlen(buffers[i]);
        messages[i].msg_hdr.msg_iov = &parts[i];
        messages[i].msg_hdr.msg_iovlen = 1;
    }
    SHOW(tg_sendmmsg(fd, messages, 3, 0));
    printf("%u %u %u bytes\n", messages[0].msg_len, messages[1].msg_len, messages[2].msg_len);
    for (int i = 0; i < 3; i++) {
        memset(buffers[i], 0, sizeof buffers[i]);
        parts[i].iov_len = sizeof buffers[i];
        messages[i].msg_hdr.msg_control = control[i];
        messages[i].msg_hdr.msg_controllen = sizeof control[i];
    }
    while (got < 3) {
        int count = tg_recvmmsg(fd, messages + got, (unsigned)(3 - got), MSG_WAITFORONE, NULL);
        if (count < 0) {
            SHOW(count);
            break;
        }
        got += count;
    }
    for (int i = 0; i < 3; i++) {
        struct cmsghdr *header = CMSG_FIRSTHDR(&messages[i].msg_hdr);
        memcpy(&number, CMSG_DATA(header), sizeof number);
        printf("%s: %u bytes, control %d %d, hop limit %d\n", buffers[i], messages[i].msg_len,
               header->cmsg_level, header->cmsg_type, number);
    }
    SHOW(tg_shutdown(fd, SHUT_RD));
    SHOW(tg_recv(fd, buffers[0], 1, 0));
    SHOW(tg_close(fd));
}

static void duplicates(void)
{
    struct sockaddr_storage name;
    socklen_t size = sizeof name;
    int first, second, third, pipe_ends[2];
    printf("-- duplicates\n");
    OPEN(first, tg_socket(family, SOCK_DGRAM, 0));
    OPEN(second, tg_socket(family, SOCK_DGRAM, 0));
    SHOW(tg_bind(first, at(&own), length));
    SHOW(ff_dup2(first, second) == second);
    SHOW(ff_dup2(second, second) == second);
    OPEN(third, ff_dup(second));
    SHOW(tg_close(first));
    SHOW(tg_close(first));
    SHOW(tg_getsockname(second, at(&name), &size));
    show_port("second", &name);
    SHOW(tg_close(second));
    SHOW(tg_getsockname(third, at(&name), &size));
    show_port("third", &name);
    /* What had the number before is closed, also a descriptor of the kernel. */
    if (pipe(pipe_ends) != 0)
        exit(2);
    SHOW(ff_dup2(third, pipe_ends[0]) == pipe_ends[0]);
    signal(SIGPIPE, SIG_IGN);
    SHOW(write(pipe_ends[1], "x", 1));
    close(pipe_ends[1]);
    SHOW(tg_getsockname(pipe_ends[0], at(&name), &size));
    SHOW(tg_close(pipe_ends[0]));
    SHOW(ff_dup2(minus_one, third));
    SHOW(ff_dup2(9999, third));
    SHOW(ff_dup2(third, minus_one));
    SHOW(tg_close(third));
}

static void on_alarm(int signum)
{
    (void)signum;
}

static void signals(void)
{
    struct sigaction action;
    /* Repeated: the first signal may come before the call. */
    struct itimerval often = {{0, 20000}, {0, 20000}}, never = {{0, 0}, {0, 0}};
    struct timeval limit = {100, 0};
    struct pollfd poller;
    struct epoll_event event;
    char byte;
    int udp, tcp, set;
    printf("-- signals\n");
    OPEN(udp, tg_socket(family, SOCK_DGRAM, 0));
    SHOW(tg_bind(udp, at(&own), length));
    OPEN(tcp, tg_socket(family, SOCK_STREAM, 0));
    SHOW(tg_connect(tcp, at(&peer), length));
    OPEN(set, tg_epoll_create1(0));
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    SHOW(tg_recv(udp, &byte, 1, 0));
    SHOW(tg_recv(tcp, &byte, 1, 0));
    SHOW(tg_epoll_wait(set, &event, 1, -1));
    poller.fd = udp;
    poller.events = POLLIN;
    SHOW(tg_poll(&poller, 1, -1));
    action.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &action, NULL);
    SHOW(tg_epoll_wait(set, &event, 1, -1));
    SHOW(tg_poll(&poller, 1, -1));
    /* A call with a time limit is not restarted. */
    SHOW(tg_setsockopt(udp, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    SHOW(tg_recv(udp, &byte, 1, 0));
    setitimer(ITIMER_REAL, &never, NULL);
    SHOW(tg_close(set));
    SHOW(tg_close(tcp));
    SHOW(tg_close(udp));
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    make_address(argv[1], 0, &own);
    make_address(argv[2], atoi(argv[3]), &peer);
    arguments();
    options();
    addresses();
    streams();
    nonblocking();
    datagrams();
    duplicates();
    signals();
    return 0;
}
