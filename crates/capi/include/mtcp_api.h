/*
 * The functions of mTCP on the Tidegate stack: a program that was written for mTCP compiles with
 * this header and links with -ltidegate. docs/c-library.md has the keys of the configuration file.
 *
 * A context belongs to the thread that has created it. Its thread runs the stack while it waits in
 * mtcp_epoll_wait or in a blocking call; several contexts share nothing where each has a core of
 * its own. Socket identifiers count from 0 in each context, and are below max_concurrency.
 *
 * Errors are those of the kernel's calls; EINVAL for a context that is NULL, EPERM for one that was
 * destroyed.
 */
#ifndef MTCP_API_H
#define MTCP_API_H

#include <netinet/in.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifndef UNUSED
#define UNUSED(x) (void)x
#endif

#ifndef INPORT_ANY
#define INPORT_ANY ((uint16_t)0)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds of identifiers. */
enum socket_type {
    MTCP_SOCK_UNUSED,
    MTCP_SOCK_STREAM,
    MTCP_SOCK_PROXY,
    MTCP_SOCK_LISTENER,
    MTCP_SOCK_EPOLL,
    MTCP_SOCK_PIPE
};

struct mtcp_conf {
    int num_cores;       /* contexts, numbered from 0 */
    int max_concurrency; /* sockets of a context */
    int max_num_buffers; /* kept, without effect */
    int rcvbuf_size;     /* bytes */
    int sndbuf_size;     /* bytes */
    int tcp_timewait;    /* kept, without effect */
    int tcp_timeout;     /* seconds that data may stay unacknowledged; -1 for the stack's own */
};

typedef struct mtcp_context *mctx_t;

/* Reads the configuration file and opens the stack. Returns 0, or -1 and prints what failed. */
int mtcp_init(const char *config_file);
/* Destroys all contexts, and waits at most two seconds until the peers have all data. */
void mtcp_destroy(void);
int mtcp_getconf(struct mtcp_conf *conf);
/* The number of cores counts before mtcp_init; a number in the configuration file replaces it. */
int mtcp_setconf(const struct mtcp_conf *conf);
/* Pins the calling thread to a processor. */
int mtcp_core_affinitize(int cpu);
/* Creates the context of a core, from 0. Returns NULL on failure. */
mctx_t mtcp_create_context(int cpu);
/* Closes all sockets of a context. */
void mtcp_destroy_context(mctx_t mctx);

typedef void (*mtcp_sighandler_t)(int);
/* Installs a handler whose signal ends waiting calls with EINTR; returns the handler before. */
mtcp_sighandler_t mtcp_register_signal(int signum, mtcp_sighandler_t handler);

/* AF_INET and AF_INET6, SOCK_STREAM and SOCK_DGRAM. */
int mtcp_socket(mctx_t mctx, int domain, int type, int protocol);
int mtcp_setsock_nonblock(mctx_t mctx, int sockid);
int mtcp_bind(mctx_t mctx, int sockid, const struct sockaddr *addr, socklen_t addrlen);
/* With several cores the listeners of all contexts share the port, and each flow stays with one. */
int mtcp_listen(mctx_t mctx, int sockid, int backlog);
int mtcp_accept(mctx_t mctx, int sockid, struct sockaddr *addr, socklen_t *addrlen);
/* Sets the addresses from which the context connects: `num_addr` from `saddr_base`, or all with
 * INADDR_ANY. Replies find the context whatever ports they have. */
int mtcp_init_rss(mctx_t mctx, in_addr_t saddr_base, int num_addr, in_addr_t daddr,
                  in_addr_t dport);
int mtcp_connect(mctx_t mctx, int sockid, const struct sockaddr *addr, socklen_t addrlen);
/* The end to read from, then the end to write to. In epoll sets as sockets are. */
int mtcp_pipe(mctx_t mctx, int pipeid[2]);
int mtcp_close(mctx_t mctx, int sockid);
/* Closes with RST. */
int mtcp_abort(mctx_t mctx, int sockid);

int mtcp_getsockname(mctx_t mctx, int sockid, struct sockaddr *addr, socklen_t *addrlen);
int mtcp_getpeername(mctx_t mctx, int sockid, struct sockaddr *addr, socklen_t *addrlen);
int mtcp_getsockopt(mctx_t mctx, int sockid, int level, int optname, void *optval,
                    socklen_t *optlen);
int mtcp_setsockopt(mctx_t mctx, int sockid, int level, int optname, const void *optval,
                    socklen_t optlen);
/* FIONREAD and FIONBIO. */
int mtcp_socket_ioctl(mctx_t mctx, int sockid, int request, void *argp);
int mtcp_ioctl(mctx_t mctx, int sockid, int request, void *argp);

ssize_t mtcp_read(mctx_t mctx, int sockid, char *buf, size_t len);
ssize_t mtcp_recv(mctx_t mctx, int sockid, char *buf, size_t len, int flags);
int mtcp_readv(mctx_t mctx, int sockid, const struct iovec *iov, int numIOV);
ssize_t mtcp_write(mctx_t mctx, int sockid, const char *buf, size_t len);
int mtcp_writev(mctx_t mctx, int sockid, const struct iovec *iov, int numIOV);

#ifdef __cplusplus
}
#endif

#endif
