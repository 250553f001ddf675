/*
 * The calls of mTCP that mtcp_server makes, on the kernel's sockets and epoll: its twin for
 * comparisons. A context is nothing here, and a configuration file has no meaning.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mtcp_api.h>
#include <mtcp_epoll.h>

#define MAX_EVENTS 1024

static struct mtcp_conf configuration = { .num_cores = 1 };
static int context;

int mtcp_init(const char *config_file)
{
    (void)config_file;
    return 0;
}

void mtcp_destroy(void)
{
}

int mtcp_getconf(struct mtcp_conf *conf)
{
    *conf = configuration;
    return 0;
}

int mtcp_setconf(const struct mtcp_conf *conf)
{
    configuration = *conf;
    return 0;
}

int mtcp_core_affinitize(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof set, &set) ? -1 : 0;
}

mctx_t mtcp_create_context(int cpu)
{
    (void)cpu;
    return (mctx_t)&context;
}

void mtcp_destroy_context(mctx_t mctx)
{
    (void)mctx;
}

mtcp_sighandler_t mtcp_register_signal(int signum, mtcp_sighandler_t handler)
{
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    return sigaction(signum, &action, &before) ? SIG_ERR : before.sa_handler;
}

int mtcp_socket(mctx_t mctx, int domain, int type, int protocol)
{
    int on = 1;
    int fd = socket(domain, type, protocol);
    (void)mctx;
    /* A listener for each core, and on the same port again after a restart. */
    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
    }
    return fd;
}

int mtcp_setsock_nonblock(mctx_t mctx, int sockid)
{
    (void)mctx;
    return fcntl(sockid, F_SETFL, O_NONBLOCK);
}

int mtcp_bind(mctx_t mctx, int sockid, const struct sockaddr *addr, socklen_t addrlen)
{
    (void)mctx;
    return bind(sockid, addr, addrlen);
}

int mtcp_listen(mctx_t mctx, int sockid, int backlog)
{
    (void)mctx;
    return listen(sockid, backlog);
}

int mtcp_accept(mctx_t mctx, int sockid, struct sockaddr *addr, socklen_t *addrlen)
{
    (void)mctx;
    return accept(sockid, addr, addrlen);
}

int mtcp_close(mctx_t mctx, int sockid)
{
    (void)mctx;
    return close(sockid);
}

int mtcp_abort(mctx_t mctx, int sockid)
{
    struct linger reset = { .l_onoff = 1, .l_linger = 0 };
    (void)mctx;
    setsockopt(sockid, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    return close(sockid);
}

int mtcp_getsockopt(mctx_t mctx, int sockid, int level, int optname, void *optval,
                    socklen_t *optlen)
{
    (void)mctx;
    return getsockopt(sockid, level, optname, optval, optlen);
}

int mtcp_setsockopt(mctx_t mctx, int sockid, int level, int optname, const void *optval,
                    socklen_t optlen)
{
    (void)mctx;
    return setsockopt(sockid, level, optname, optval, optlen);
}

ssize_t mtcp_read(mctx_t mctx, int sockid, char *buf, size_t len)
{
    (void)mctx;
    return read(sockid, buf, len);
}

ssize_t mtcp_write(mctx_t mctx, int sockid, const char *buf, size_t len)
{
    (void)mctx;
    return write(sockid, buf, len);
}

int mtcp_epoll_create(mctx_t mctx, int size)
{
    (void)mctx;
    return epoll_create(size);
}

int mtcp_epoll_ctl(mctx_t mctx, int epid, int op, int sockid, struct mtcp_epoll_event *event)
{
    struct epoll_event kernel;
    (void)mctx;
    memset(&kernel, 0, sizeof kernel);
    if (event) {
        kernel.events = event->events;
        kernel.data.u64 = event->data.u64;
    }
    return epoll_ctl(epid, op, sockid, &kernel);
}

int mtcp_epoll_wait(mctx_t mctx, int epid, struct mtcp_epoll_event *events, int maxevents,
                    int timeout)
{
    struct epoll_event kernel[MAX_EVENTS];
    int count;
    (void)mctx;
    count = epoll_wait(epid, kernel, maxevents < MAX_EVENTS ? maxevents : MAX_EVENTS, timeout);
    for (int i = 0; i < count; i++) {
        events[i].events = kernel[i].events;
        events[i].data.u64 = kernel[i].data.u64;
    }
    return count;
}
