/*
 * Tidegate: sockets of a user-space network stack, as C functions.
 *
 * Each function is as the kernel's of the same name without `tg_`: arguments, return values and
 * errno. What differs is said here; docs/c-library.md has the rest.
 *
 * Descriptors. The descriptors of this library are numbers that the kernel does not use for
 * anything else, so they can be mixed with descriptors of the kernel in tg_epoll_ctl, tg_poll and
 * tg_select. Every other function returns EBADF for a number that is not open, and ENOTSOCK for a
 * descriptor of the kernel. A descriptor of this library is closed by tg_close only.
 *
 * Threads. Every function can be called by every thread at any time, and several threads can use
 * one descriptor. tg_last_error returns the text of the calling thread. Signal handlers must not
 * call this library. A handler that was installed without SA_RESTART ends a waiting call with
 * EINTR; tg_epoll_wait, tg_poll and tg_select end in any case.
 *
 * Processes. A forked child cannot use the sockets of its parent; tg_socket fails with EIO there.
 *
 * No function raises SIGPIPE: errno is EPIPE.
 */
#ifndef TIDEGATE_H
#define TIDEGATE_H

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

struct mmsghdr;

/* Version of this header. */
#define TIDEGATE_VERSION_MAJOR 0
#define TIDEGATE_VERSION_MINOR 1

/*
 * The stack of the process.
 */

/* Opens the stack that a configuration file (TOML) describes: `socket = "PATH"` attaches to a
 * daemon, and a section [host] opens a stack in this process. With NULL the environment says where
 * the stack is: TIDEGATE_CONFIG names such a file, TIDEGATE_SOCKET the socket of a daemon;
 * otherwise it is the daemon at /run/tidegate/tidegate.sock. The first tg_socket calls
 * tg_init(NULL) if the program has not.
 *
 * Errors: EINVAL for a file with an error, ENETDOWN when the stack cannot be opened, EADDRNOTAVAIL
 * when another host has the address, EALREADY when the process has a stack, ENOENT, ECONNREFUSED
 * and EACCES of the daemon's socket. tg_last_error has the text. */
int tg_init(const char *config_file);

/* Attaches to the daemon that listens on this Unix socket; NULL is the default. Errors: as
 * tg_init. */
int tg_attach(const char *daemon_socket);

/* Returns what failed in the calling thread's last tg_init, tg_attach or tg_socket, and what to do.
 * Never NULL. The text is valid until the thread's next failure. */
const char *tg_last_error(void);

/* Closes all descriptors of this library, and waits at most two seconds until the peers have all
 * data. Called at exit. */
void tg_finish(void);

/*
 * Sockets. Domains AF_INET and AF_INET6; types SOCK_STREAM and SOCK_DGRAM, with SOCK_NONBLOCK and
 * SOCK_CLOEXEC.
 */
int tg_socket(int domain, int type, int protocol);

/* A TCP socket takes its port when it listens or connects; tg_bind says whether the port is free,
 * and chooses one for port 0. */
int tg_bind(int fd, const struct sockaddr *address, socklen_t length);
int tg_listen(int fd, int backlog);
int tg_accept(int fd, struct sockaddr *address, socklen_t *length);
int tg_accept4(int fd, struct sockaddr *address, socklen_t *length, int flags);
int tg_connect(int fd, const struct sockaddr *address, socklen_t length);
int tg_shutdown(int fd, int how);
int tg_close(int fd);
int tg_getsockname(int fd, struct sockaddr *address, socklen_t *length);
int tg_getpeername(int fd, struct sockaddr *address, socklen_t *length);

/* Levels SOL_SOCKET, IPPROTO_TCP, IPPROTO_IP and IPPROTO_IPV6. The options are listed in
 * docs/c-library.md; others fail with ENOPROTOOPT. */
int tg_setsockopt(int fd, int level, int option, const void *value, socklen_t length);
int tg_getsockopt(int fd, int level, int option, void *value, socklen_t *length);

/* F_GETFL and F_SETFL (O_NONBLOCK), F_GETFD and F_SETFD, F_DUPFD without a lowest number. */
int tg_fcntl(int fd, int command, int argument);

/* FIONREAD and FIONBIO; the argument is an int. */
int tg_ioctl(int fd, unsigned long request, void *argument);

/*
 * Data. Flags: MSG_DONTWAIT, MSG_MORE, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, MSG_WAITALL.
 */
ssize_t tg_recv(int fd, void *buffer, size_t length, int flags);
ssize_t tg_recvfrom(int fd, void *buffer, size_t length, int flags, struct sockaddr *from,
                    socklen_t *from_length);
ssize_t tg_recvmsg(int fd, struct msghdr *message, int flags);
int tg_recvmmsg(int fd, struct mmsghdr *messages, unsigned int count, int flags,
                struct timespec *timeout);
ssize_t tg_read(int fd, void *buffer, size_t length);
ssize_t tg_readv(int fd, const struct iovec *buffers, int count);

ssize_t tg_send(int fd, const void *data, size_t length, int flags);
ssize_t tg_sendto(int fd, const void *data, size_t length, int flags, const struct sockaddr *to,
                  socklen_t to_length);
ssize_t tg_sendmsg(int fd, const struct msghdr *message, int flags);
/* The datagrams leave together, with one system call. */
int tg_sendmmsg(int fd, struct mmsghdr *messages, unsigned int count, int flags);
ssize_t tg_write(int fd, const void *data, size_t length);
ssize_t tg_writev(int fd, const struct iovec *buffers, int count);

/*
 * Data without a copy. The functions of the program run while the stack is locked: they must be
 * short, must not call this library, and must return (no longjmp, no C++ exception).
 */

/* Function that reads received data where it lies; returns how many bytes it takes. */
typedef size_t (*tg_read_function)(void *context, const void *data, size_t length);
/* Function that writes data to the send buffer; returns how many bytes it has written. */
typedef size_t (*tg_write_function)(void *context, void *space, size_t length);
/* Function that writes a reply over a datagram of `length` bytes in a buffer of `space` bytes;
 * returns the length of the reply, or -1 for none. */
typedef ssize_t (*tg_reply_function)(void *context, void *datagram, size_t length, size_t space);

/* Calls `read` with the received data of a connection, as much as is contiguous. Returns the bytes
 * taken; 0 at the end of the stream, without calling `read`, or if `read` takes none. */
ssize_t tg_recv_with(int fd, tg_read_function read, void *context);
/* Calls `write` with send-buffer memory of a connection, at most `limit` bytes. The data stays
 * there until the peer acknowledges it. Returns the bytes sent. */
ssize_t tg_send_with(int fd, size_t limit, tg_write_function write, void *context);
/* Waits for datagrams, calls `reply` with each of at most 64, and sends the replies together.
 * Returns the number of datagrams. */
ssize_t tg_exchange(int fd, tg_reply_function reply, void *context);

/*
 * Waiting for many descriptors, of this library and of the kernel. An epoll set cannot be a member
 * of another one. Descriptors of epoll sets are closed by tg_close.
 */
int tg_epoll_create(int size);
int tg_epoll_create1(int flags);
int tg_epoll_ctl(int set, int operation, int fd, struct epoll_event *event);
int tg_epoll_wait(int set, struct epoll_event *events, int max, int timeout);
int tg_epoll_pwait(int set, struct epoll_event *events, int max, int timeout,
                   const sigset_t *mask);
int tg_poll(struct pollfd *fds, nfds_t count, int timeout);
/* Leaves the timeout as it is. */
int tg_select(int count, fd_set *readable, fd_set *writable, fd_set *exceptional,
              struct timeval *timeout);

/*
 * Rings: many operations on many sockets by one call, and their results as completions. The concepts
 * are those of io_uring; docs/c-library.md has an example.
 *
 * A ring has buffers, which programs name by index. The program holds a buffer that
 * tg_ring_take_buffer or a completion gives it, until it queues a send of that buffer or releases
 * it. A ring does not use O_NONBLOCK and the time-outs of its sockets. It keeps a socket open until
 * TG_RING_CLOSE or the end of the ring, also after tg_close. Threads that use one ring take turns. A
 * ring is closed by tg_close, and is not for tg_poll and epoll sets.
 */

/* Opcodes. */
enum {
    /* Completes with 0. */
    TG_RING_NOP,
    /* Accepts a connection of the listener `fd`; the result is its descriptor. */
    TG_RING_ACCEPT,
    /* Connects `fd` to `address`. */
    TG_RING_CONNECT,
    /* Receives a datagram, or bytes of a connection, into a free buffer; the result is their number,
     * 0 without a buffer at the end of a stream. Without a free buffer it stays in flight. */
    TG_RING_RECV,
    /* Sends `length` bytes of `buffer`, all of them; a datagram to `address`, unless it is NULL. The
     * completion returns the buffer. */
    TG_RING_SEND,
    /* Closes `fd`: the descriptor when it is queued, the socket after its sends. Its receives in
     * flight complete with ECANCELED before. */
    TG_RING_CLOSE,
    /* Cancels the operations in flight whose user_data is `target`; the result is their number. */
    TG_RING_CANCEL
};

/* Flags of operations: TG_RING_ACCEPT and TG_RING_RECV stay in flight after a completion; a send,
 * close, cancel or nop that succeeds has no completion, and frees its buffer. */
#define TG_RING_MULTISHOT 1u
#define TG_RING_SKIP_SUCCESS 2u

/* Flags of completions: the operation stays in flight; `buffer` is valid, and the program holds it;
 * the datagram was longer than the buffer. */
#define TG_RING_HAS_MORE 1u
#define TG_RING_HAS_BUFFER 2u
#define TG_RING_TRUNCATED 4u

/* Operation. What its opcode does not use is 0. */
struct tg_ring_entry {
    int opcode;
    unsigned int flags;
    int fd;
    unsigned int buffer;
    uint64_t user_data;
    uint64_t target;
    /* Read by tg_ring_push. */
    const struct sockaddr *address;
    socklen_t address_length;
    uint32_t length;
};

/* Result of an operation. */
struct tg_ring_completion {
    uint64_t user_data;
    /* A negative error code, as -ECONNRESET. */
    int result;
    unsigned int flags;
    unsigned int buffer;
    /* Sender of a datagram, or peer of an accepted connection. */
    socklen_t from_length;
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } from;
};

/* Creates a ring with these limits; 0 selects the default. `entries`: operations that can be queued,
 * and in flight, each (256; at most 32768); the completion queue is twice as long. `buffers` of
 * `buffer_bytes` bytes each (256 of 2048; at most 65536 of 1 MiB). Errors: EINVAL. */
int tg_ring_create(unsigned int entries, unsigned int buffers, unsigned int buffer_bytes);

/* Queues operations for the next submit; returns how many. An error is that of the first entry. Errors:
 * EBUSY when the queue is full: submit, and take completions; EINVAL for a buffer that the program
 * does not hold. */
int tg_ring_push(int ring, const struct tg_ring_entry *entries, unsigned int count);

/* Starts the queued operations without waiting; returns how many. Errors: EBUSY when none can start:
 * take completions, or cancel operations. */
int tg_ring_submit(int ring);

/* Submits, and waits until `count` completions can be taken, at most as long as `timeout`; NULL is
 * without limit. Returns how many can be taken, fewer when the time is over or when receives wait
 * for a free buffer. Errors: EINVAL for a count above `entries`, ENOBUFS when nothing can complete
 * before the program releases a buffer, EINTR. */
int tg_ring_submit_and_wait(int ring, unsigned int count, const struct timespec *timeout);

/* Takes at most `max` completions, oldest first; returns how many. */
int tg_ring_completions(int ring, struct tg_ring_completion *completions, unsigned int max);

/* Takes a free buffer. Errors: ENOBUFS. */
int tg_ring_take_buffer(int ring);
/* Frees a buffer that the program holds. */
int tg_ring_release_buffer(int ring, unsigned int buffer);
/* Returns the memory of a buffer, valid until the ring is closed; NULL for an error. */
void *tg_ring_buffer(int ring, unsigned int buffer);

#ifdef __cplusplus
}
#endif

#endif
