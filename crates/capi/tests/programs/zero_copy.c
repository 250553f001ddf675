/*
 * Transfers without a copy.
 *
 *   zero_copy call ADDRESS PORT    sends 3 MB to an echo server and checks what comes back
 *   zero_copy serve PORT           answers datagrams in place, with their bytes in upper case
 */
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tidegate.h>

#define TRANSFER_BYTES 3000000
#define MAX_UNANSWERED 200000

static size_t sent, received;
static int is_wrong;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static size_t write_bytes(void *context, void *space, size_t length)
{
    unsigned char *bytes = (unsigned char *)space;
    if (context != &sent)
        is_wrong = 1;
    for (size_t i = 0; i < length; i++)
        bytes[i] = (unsigned char)(sent++ % 251);
    return length;
}

static size_t read_bytes(void *context, const void *data, size_t length)
{
    const unsigned char *bytes = (const unsigned char *)data;
    if (context != &received)
        is_wrong = 1;
    for (size_t i = 0; i < length; i++)
        is_wrong |= bytes[i] != received++ % 251;
    return length;
}

static ssize_t upper_case(void *context, void *datagram, size_t length, size_t space)
{
    char *text = (char *)datagram;
    if (context || space < length)
        is_wrong = 1;
    for (size_t i = 0; i < length; i++)
        text[i] = (char)toupper((unsigned char)text[i]);
    return length == 1 ? -1 : (ssize_t)length;
}

static void call(const char *text, int port)
{
    struct sockaddr_in v4 = {0};
    struct sockaddr_in6 v6 = {0};
    int is_v4 = inet_pton(AF_INET, text, &v4.sin_addr) == 1, fd;
    v4.sin_family = AF_INET;
    v6.sin6_family = AF_INET6;
    v4.sin_port = v6.sin6_port = htons((uint16_t)port);
    if (!is_v4 && inet_pton(AF_INET6, text, &v6.sin6_addr) != 1)
        exit(2);
    fd = tg_socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM, 0);
    if (fd < 0 || tg_connect(fd, is_v4 ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6,
                             is_v4 ? sizeof v4 : sizeof v6) < 0)
        fail("connect");
    while (received < TRANSFER_BYTES) {
        if (sent < TRANSFER_BYTES && sent - received < MAX_UNANSWERED) {
            if (tg_send_with(fd, TRANSFER_BYTES - sent, write_bytes, &sent) <= 0)
                fail("tg_send_with");
        } else if (tg_recv_with(fd, read_bytes, &received) <= 0) {
            fail("tg_recv_with");
        }
    }
    if (tg_shutdown(fd, SHUT_WR) < 0 || tg_recv_with(fd, read_bytes, &received) != 0)
        fail("end of stream");
    if (tg_recv_with(fd, NULL, NULL) != -1 || errno != EFAULT)
        fail("no function");
    if (tg_exchange(fd, upper_case, NULL) != -1 || errno != EOPNOTSUPP)
        fail("exchange on a stream");
    printf("%s\n", is_wrong ? "wrong" : "echoed");
}

static void serve(int port)
{
    struct sockaddr_in6 own = {0};
    int fd = tg_socket(AF_INET6, SOCK_DGRAM, 0);
    own.sin6_family = AF_INET6;
    own.sin6_port = htons((uint16_t)port);
    if (fd < 0 || tg_bind(fd, (struct sockaddr *)&own, sizeof own) < 0)
        fail("bind");
    printf("ready\n");
    fflush(stdout);
    while (tg_exchange(fd, upper_case, NULL) > 0 && !is_wrong)
        ;
    fail("tg_exchange");
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
