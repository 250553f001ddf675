/*
 * Echo server for UDP and TCP on IPv4 and IPv6 by a ring, and a client for it.
 *
 *   ring_echo serve PORT           serves until it is killed
 *   ring_echo call ADDRESS PORT    sends over TCP and UDP, and checks what comes back
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tidegate.h>

#define BATCH 64
#define TRANSFER_BYTES 1000000
#define PIECE_BYTES 1000
#define MAX_UNANSWERED 100000
/* user_data of what is not a receive. */
#define ACCEPTED (1ull << 32)
#define OTHER (2ull << 32)

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void push(int ring, const struct tg_ring_entry *entry)
{
    while (tg_ring_push(ring, entry, 1) != 1) {
        if (errno != EBUSY || tg_ring_submit(ring) < 0)
            fail("tg_ring_push");
    }
}

static void push_receive(int ring, int fd)
{
    struct tg_ring_entry entry = {0};
    entry.opcode = TG_RING_RECV;
    entry.flags = TG_RING_MULTISHOT;
    entry.fd = fd;
    entry.user_data = (uint64_t)fd;
    push(ring, &entry);
}

static void push_send(int ring, int fd, unsigned int buffer, uint32_t length,
                      const struct sockaddr *to, socklen_t to_length)
{
    struct tg_ring_entry entry = {0};
    entry.opcode = TG_RING_SEND;
    entry.flags = TG_RING_SKIP_SUCCESS;
    entry.fd = fd;
    entry.buffer = buffer;
    entry.length = length;
    entry.user_data = OTHER;
    entry.address = to;
    entry.address_length = to_length;
    push(ring, &entry);
}

static int open_server(int type, int port)
{
    struct sockaddr_in6 own = {0};
    int fd = tg_socket(AF_INET6, type, 0);
    own.sin6_family = AF_INET6;
    own.sin6_port = htons((uint16_t)port);
    if (fd < 0 || tg_bind(fd, (struct sockaddr *)&own, sizeof own) < 0)
        fail("bind");
    if (type == SOCK_STREAM && tg_listen(fd, 128) < 0)
        fail("listen");
    return fd;
}

static void serve_one(int ring, int udp, const struct tg_ring_completion *done)
{
    struct tg_ring_entry close = {0};
    if (done->user_data == ACCEPTED) {
        if (done->result < 0 || !(done->flags & TG_RING_HAS_MORE))
            exit(3);
        push_receive(ring, done->result);
    } else if (done->user_data == OTHER) {
        /* A send that failed: the receive on the connection ends, too. */
        if (done->flags & TG_RING_HAS_BUFFER)
            tg_ring_release_buffer(ring, done->buffer);
    } else if (done->flags & TG_RING_HAS_BUFFER) {
        int fd = (int)done->user_data;
        const struct sockaddr *to = fd == udp ? &done->from.any : NULL;
        push_send(ring, fd, done->buffer, (uint32_t)done->result, to, done->from_length);
    } else if ((int)done->user_data == udp) {
        /* An error about a datagram that was sent. */
        push_receive(ring, udp);
    } else {
        close.opcode = TG_RING_CLOSE;
        close.flags = TG_RING_SKIP_SUCCESS;
        close.fd = (int)done->user_data;
        close.user_data = OTHER;
        push(ring, &close);
    }
}

static void serve(int port)
{
    struct tg_ring_completion done[BATCH];
    struct tg_ring_entry accept = {0};
    int listener = open_server(SOCK_STREAM, port), udp = open_server(SOCK_DGRAM, port);
    int ring = tg_ring_create(0, 0, 0);
    if (ring < 0)
        fail("tg_ring_create");
    accept.opcode = TG_RING_ACCEPT;
    accept.flags = TG_RING_MULTISHOT;
    accept.fd = listener;
    accept.user_data = ACCEPTED;
    push(ring, &accept);
    push_receive(ring, udp);
    while (tg_ring_submit_and_wait(ring, 1, NULL) >= 0) {
        int count = tg_ring_completions(ring, done, BATCH);
        for (int i = 0; i < count; i++)
            serve_one(ring, udp, &done[i]);
    }
    fail("tg_ring_submit_and_wait");
}

/* Waits for one completion. */
static struct tg_ring_completion next(int ring)
{
    struct timespec limit = {20, 0};
    struct tg_ring_completion done;
    if (tg_ring_submit_and_wait(ring, 1, &limit) < 1)
        fail("no completion");
    if (tg_ring_completions(ring, &done, 1) != 1)
        exit(4);
    return done;
}

static void fill(int ring, unsigned int buffer, size_t first)
{
    unsigned char *bytes = tg_ring_buffer(ring, buffer);
    for (size_t i = 0; i < PIECE_BYTES; i++)
        bytes[i] = (unsigned char)((first + i) % 251);
}

/* Sends over a connected socket until all has come back. */
static void transfer(int ring, int fd, size_t total, size_t max_unanswered)
{
    size_t sent = 0, received = 0;
    push_receive(ring, fd);
    while (received < total) {
        while (sent < total && sent - received < max_unanswered) {
            int buffer = tg_ring_take_buffer(ring);
            if (buffer < 0)
                break;
            fill(ring, (unsigned int)buffer, sent);
            push_send(ring, fd, (unsigned int)buffer, PIECE_BYTES, NULL, 0);
            sent += PIECE_BYTES;
        }
        struct tg_ring_completion done = next(ring);
        if (done.user_data != (uint64_t)fd || done.result <= 0 || !(done.flags & TG_RING_HAS_MORE)) {
            fprintf(stderr, "result %d\n", done.result);
            exit(5);
        }
        const unsigned char *bytes = tg_ring_buffer(ring, done.buffer);
        for (int i = 0; i < done.result; i++) {
            if (bytes[i] != received++ % 251)
                exit(6);
        }
        tg_ring_release_buffer(ring, done.buffer);
    }
}

static void call(const char *text, int port)
{
    struct sockaddr_in v4 = {0};
    struct sockaddr_in6 v6 = {0};
    int is_v4 = inet_pton(AF_INET, text, &v4.sin_addr) == 1;
    if (!is_v4 && inet_pton(AF_INET6, text, &v6.sin6_addr) != 1)
        exit(2);
    v4.sin_family = AF_INET;
    v6.sin6_family = AF_INET6;
    v4.sin_port = v6.sin6_port = htons((uint16_t)port);
    int ring = tg_ring_create(32, 64, 4096);
    struct tg_ring_entry entry = {0};
    struct tg_ring_completion done;
    for (int type = SOCK_STREAM;; type = SOCK_DGRAM) {
        entry.opcode = TG_RING_CONNECT;
        entry.fd = tg_socket(is_v4 ? AF_INET : AF_INET6, type, 0);
        entry.address = is_v4 ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6;
        entry.address_length = is_v4 ? sizeof v4 : sizeof v6;
        if (ring < 0 || entry.fd < 0)
            fail("open");
        push(ring, &entry);
        done = next(ring);
        if (done.result != 0)
            exit(7);
        /* A datagram at a time: none is lost. */
        if (type == SOCK_STREAM)
            transfer(ring, entry.fd, TRANSFER_BYTES, MAX_UNANSWERED);
        else
            transfer(ring, entry.fd, 10 * PIECE_BYTES, PIECE_BYTES);
        entry.opcode = TG_RING_CLOSE;
        entry.user_data = OTHER;
        push(ring, &entry);
        done = next(ring);
        if (done.user_data != (uint64_t)entry.fd || done.result != -ECANCELED)
            exit(8);
        done = next(ring);
        if (done.user_data != OTHER || done.result != 0)
            exit(9);
        if (tg_send(entry.fd, "x", 1, 0) != -1 || errno != EBADF)
            exit(10);
        if (type == SOCK_DGRAM)
            break;
        entry.user_data = 0;
    }
    /* Nobody listens there. */
    v4.sin_port = v6.sin6_port = htons((uint16_t)(port + 1));
    entry.opcode = TG_RING_CONNECT;
    entry.fd = tg_socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM, 0);
    push(ring, &entry);
    done = next(ring);
    if (done.result != -ECONNREFUSED)
        exit(11);
    /* Arguments. */
    entry.opcode = 99;
    if (tg_ring_push(ring, &entry, 1) != -1 || errno != EINVAL)
        exit(12);
    entry.opcode = TG_RING_RECV;
    entry.fd = ring;
    if (tg_ring_push(ring, &entry, 1) != -1 || errno != ENOTSOCK)
        exit(13);
    if (tg_ring_submit(entry.fd + 1000) != -1 || errno != EBADF)
        exit(14);
    if (tg_ring_buffer(ring, 64) || errno != EINVAL || tg_ring_create(1u << 20, 0, 0) != -1)
        exit(15);
    if (tg_close(ring) < 0)
        fail("tg_close");
    printf("echoed\n");
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "call") == 0)
        call(argv[2], atoi(argv[3]));
    else if (argc == 3 && strcmp(argv[1], "serve") == 0)
        serve(atoi(argv[2]));
    else
        return 2;
    return 0;
}
