/*
 * Pipes of mTCP: between two threads, in an epoll set, and their errors. Prints "passed".
 *
 *   mtcp_pipe CONFIGURATION
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include <mtcp_api.h>
#include <mtcp_epoll.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, strerror(errno));           \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define BULK_BYTES 3000000

static mctx_t context;
static int ends[2];

static void *write_greeting(void *unused)
{
    char hello[] = "hello, ", world[] = "world";
    struct iovec parts[] = {{hello, strlen(hello)}, {world, strlen(world)}};
    CHECK(mtcp_writev(context, ends[1], parts, 2) == 12);
    return unused;
}

/* More than a pipe holds: waits for the reader. */
static void *write_bulk(void *unused)
{
    static char bulk[BULK_BYTES];
    for (size_t i = 0; i < sizeof bulk; i++)
        bulk[i] = (char)(i % 251);
    for (size_t sent = 0; sent < sizeof bulk;) {
        ssize_t len = mtcp_write(context, ends[1], bulk + sent, sizeof bulk - sent);
        CHECK(len > 0);
        sent += (size_t)len;
    }
    CHECK(mtcp_close(context, ends[1]) == 0);
    return unused;
}

int main(int argc, char **argv)
{
    char bytes[4096];
    pthread_t thread;
    CHECK(argc == 2 && mtcp_init(argv[1]) == 0);
    CHECK((context = mtcp_create_context(0)));
    CHECK(mtcp_pipe(context, NULL) == -1 && errno == EFAULT);
    CHECK(mtcp_pipe(context, ends) == 0 && ends[0] != ends[1]);
    CHECK(mtcp_read(context, ends[1], bytes, 1) == -1 && errno == EBADF);
    CHECK(mtcp_write(context, ends[0], bytes, 1) == -1 && errno == EBADF);

    int set = mtcp_epoll_create(context, 8);
    struct mtcp_epoll_event event = {.events = MTCP_EPOLLIN, .data.sockid = ends[0]}, found[8];
    CHECK(mtcp_epoll_ctl(context, set, MTCP_EPOLL_CTL_ADD, ends[0], &event) == 0);
    CHECK(mtcp_epoll_wait(context, set, found, 8, 0) == 0);
    CHECK(pthread_create(&thread, NULL, write_greeting, NULL) == 0);
    CHECK(mtcp_epoll_wait(context, set, found, 8, -1) == 1);
    CHECK(found[0].data.sockid == ends[0] && found[0].events == MTCP_EPOLLIN);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(mtcp_read(context, ends[0], bytes, sizeof bytes) == 12 && !memcmp(bytes, "hello, world", 12));
    CHECK(mtcp_epoll_ctl(context, set, MTCP_EPOLL_CTL_DEL, ends[0], NULL) == 0);

    CHECK(pthread_create(&thread, NULL, write_bulk, NULL) == 0);
    size_t received = 0;
    for (ssize_t len; (len = mtcp_read(context, ends[0], bytes, sizeof bytes)) > 0;)
        for (ssize_t i = 0; i < len; i++)
            CHECK(bytes[i] == (char)(received++ % 251));
    CHECK(received == BULK_BYTES);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(mtcp_close(context, ends[0]) == 0);
    CHECK(mtcp_read(context, ends[0], bytes, 1) == -1 && errno == EBADF);

    CHECK(mtcp_pipe(context, ends) == 0);
    CHECK(mtcp_setsock_nonblock(context, ends[0]) == 0);
    CHECK(mtcp_read(context, ends[0], bytes, 1) == -1 && errno == EAGAIN);
    CHECK(mtcp_close(context, ends[0]) == 0);
    CHECK(mtcp_write(context, ends[1], "x", 1) == -1 && errno == EPIPE);
    mtcp_destroy_context(context);
    mtcp_destroy();
    puts("passed");
    return 0;
}
