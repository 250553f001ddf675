/*
 * The functions of F-Stack on the Tidegate stack: a program that was written for F-Stack compiles
 * with this header and links with -ltidegate. docs/c-library.md has the keys of the configuration
 * file.
 *
 * One thread calls ff_init, opens sockets and calls ff_run. ff_run calls the program's function in
 * a loop, and sleeps between two calls, for at most one millisecond, while no kqueue or epoll set of
 * the program has an event. ff_kevent and ff_epoll_wait never wait; ff_poll and ff_select wait as
 * long as they are told.
 *
 * Errors are those of the kernel's calls on Linux. Addresses are Linux's, too: struct linux_sockaddr
 * has the layout of struct sockaddr, and AF_INET6 the value of Linux.
 */
#ifndef FF_API_H
#define FF_API_H

#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "ff_event.h"

#ifdef __cplusplus
extern "C" {
#endif

struct linux_sockaddr {
    short sa_family;
    char sa_data[14];
};

#define AF_INET6_LINUX 10
#define PF_INET6_LINUX AF_INET6_LINUX
#define AF_INET6_FREEBSD 28
#define PF_INET6_FREEBSD AF_INET6_FREEBSD

typedef int (*loop_func_t)(void *arg);

/* Reads the configuration file (--conf FILE, config.ini by default) and opens the stack. Returns 0,
 * or -1 and prints what failed. */
int ff_init(int argc, char *const argv[]);
/* Calls `loop` until ff_stop_run is called. */
void ff_run(loop_func_t loop, void *arg);
void ff_stop_run(void);

int ff_socket(int domain, int type, int protocol);
int ff_bind(int s, const struct linux_sockaddr *addr, socklen_t addrlen);
int ff_listen(int s, int backlog);
/* The new socket is non-blocking if the listener is, as on FreeBSD. */
int ff_accept(int s, struct linux_sockaddr *addr, socklen_t *addrlen);
int ff_accept4(int s, struct linux_sockaddr *addr, socklen_t *addrlen, int flags);
int ff_connect(int s, const struct linux_sockaddr *name, socklen_t namelen);
int ff_close(int fd);
int ff_shutdown(int s, int how);
int ff_getpeername(int s, struct linux_sockaddr *name, socklen_t *namelen);
int ff_getsockname(int s, struct linux_sockaddr *name, socklen_t *namelen);
int ff_setsockopt(int s, int level, int optname, const void *optval, socklen_t optlen);
int ff_getsockopt(int s, int level, int optname, void *optval, socklen_t *optlen);
/* F_GETFL and F_SETFL, with an int. */
int ff_fcntl(int fd, int cmd, ...);
/* FIONREAD and FIONBIO, with a pointer to an int. */
int ff_ioctl(int fd, unsigned long request, ...);
int ff_dup(int oldfd);
int ff_dup2(int oldfd, int newfd);

ssize_t ff_read(int d, void *buf, size_t nbytes);
ssize_t ff_readv(int fd, const struct iovec *iov, int iovcnt);
ssize_t ff_recv(int s, void *buf, size_t len, int flags);
ssize_t ff_recvfrom(int s, void *buf, size_t len, int flags, struct linux_sockaddr *from,
                    socklen_t *fromlen);
ssize_t ff_recvmsg(int s, struct msghdr *msg, int flags);
ssize_t ff_write(int fd, const void *buf, size_t nbytes);
ssize_t ff_writev(int fd, const struct iovec *iov, int iovcnt);
ssize_t ff_send(int s, const void *buf, size_t len, int flags);
ssize_t ff_sendto(int s, const void *buf, size_t len, int flags, const struct linux_sockaddr *to,
                  socklen_t tolen);
ssize_t ff_sendmsg(int s, const struct msghdr *msg, int flags);

/* Message of `len` bytes that is filled piece by piece: ff_zc_mbuf_write appends. ff_zc_send or
 * ff_write with bsd_mbuf sends the message, once, and frees it, also after an error; what has no
 * space in the socket is not sent. A message that is not sent is never freed. */
struct ff_zc_mbuf {
    void *bsd_mbuf;
    void *bsd_mbuf_off;
    int off;
    int len;
};
int ff_zc_mbuf_get(struct ff_zc_mbuf *m, int len);
int ff_zc_mbuf_write(struct ff_zc_mbuf *m, const char *data, int len);
ssize_t ff_zc_send(int fd, const void *mb, size_t nbytes);

int ff_select(int nfds, fd_set *readfds, fd_set *writefds, fd_set *exceptfds,
              struct timeval *timeout);
int ff_poll(struct pollfd fds[], nfds_t nfds, int timeout);

/* Filters EVFILT_READ and EVFILT_WRITE. Returns at once, whatever the timeout is. */
int ff_kqueue(void);
int ff_kevent(int kq, const struct kevent *changelist, int nchanges, struct kevent *eventlist,
              int nevents, const struct timespec *timeout);
/* Calls `do_each` with each event, and a pointer to `eventlist` that it may advance. */
int ff_kevent_do_each(int kq, const struct kevent *changelist, int nchanges, void *eventlist,
                      int nevents, const struct timespec *timeout,
                      void (*do_each)(void **, struct kevent *));

int ff_gettimeofday(struct timeval *tv, void *tz);

/* True for a descriptor of this library. */
int ff_fdisused(int fd);
/* Number of descriptors that the process may have. */
int ff_getmaxfd(void);

/* Threads of the system: any thread may use the sockets. */
int ff_pthread_create(pthread_t *thread, const pthread_attr_t *attr,
                      void *(*start_routine)(void *), void *arg);
int ff_pthread_join(pthread_t thread, void **retval);

#ifdef __cplusplus
}
#endif

#endif
