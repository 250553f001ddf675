/*
 * Sends numbered messages to a Kafka broker, or receives and checks them, by librdkafka on
 * Tidegate's sockets:
 *
 *   kafka_client produce|consume BROKER TOPIC COUNT
 *
 * librdkafka is the system's own archive. Its calls of sockets are renamed to those below, which is
 * all that it takes; with -DKERNEL they are the kernel's. Built by
 * scripts/kafka client FOLDER, measured by tidegate lab kafka.
 */
#include <errno.h>
#include <fcntl.h>
#include <librdkafka/rdkafka.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef KERNEL
#include <tidegate.h>

/* librdkafka has pipes, too: these are the kernel's. */
int kafka_fcntl(int fd, int command, long argument) {
    int result = tg_fcntl(fd, command, argument);
    return result == -1 && errno == ENOTSOCK ? fcntl(fd, command, argument) : result;
}

/* poll in an archive that checks its arguments. */
int kafka_poll_chk(struct pollfd *fds, nfds_t count, int timeout, size_t space) {
    (void)space;
    return tg_poll(fds, count, timeout);
}

int kafka_close(int fd) {
    int result = tg_close(fd);
    return result == -1 && errno == EBADF ? close(fd) : result;
}
#endif

enum { MESSAGE_BYTES = 100 };

static void fail(const char *what, const char *why) {
    fprintf(stderr, "kafka_client: %s: %s\n", what, why);
    exit(1);
}

static void write_message(char *message, long number) {
    snprintf(message, MESSAGE_BYTES + 1, "%0*ld", MESSAGE_BYTES, number);
}

static void on_delivery(rd_kafka_t *client, const rd_kafka_message_t *message, void *context) {
    (void)client;
    if (message->err)
        fail("a message was not delivered", rd_kafka_err2str(message->err));
    ++*(long *)context;
}

static void produce(rd_kafka_t *client, const char *topic, long count, const long *delivered) {
    char message[MESSAGE_BYTES + 1];
    for (long number = 0; number < count; number++) {
        write_message(message, number);
        rd_kafka_resp_err_t error;
        while ((error = rd_kafka_producev(client, RD_KAFKA_V_TOPIC(topic), RD_KAFKA_V_PARTITION(0),
                                          RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY),
                                          RD_KAFKA_V_VALUE(message, MESSAGE_BYTES),
                                          RD_KAFKA_V_END)) == RD_KAFKA_RESP_ERR__QUEUE_FULL)
            rd_kafka_poll(client, 100);
        if (error)
            fail("cannot produce", rd_kafka_err2str(error));
        rd_kafka_poll(client, 0);
    }
    if (rd_kafka_flush(client, 60000) != RD_KAFKA_RESP_ERR_NO_ERROR || *delivered != count)
        fail("cannot produce", "messages were not delivered in a minute");
}

static void consume(rd_kafka_t *client, const char *topic, long count) {
    rd_kafka_topic_partition_list_t *from = rd_kafka_topic_partition_list_new(1);
    rd_kafka_topic_partition_list_add(from, topic, 0)->offset = 0;
    rd_kafka_resp_err_t error = rd_kafka_assign(client, from);
    if (error)
        fail("cannot consume", rd_kafka_err2str(error));
    rd_kafka_topic_partition_list_destroy(from);
    char expected[MESSAGE_BYTES + 1];
    for (long number = 0; number < count; number++) {
        rd_kafka_message_t *message = rd_kafka_consumer_poll(client, 60000);
        if (!message)
            fail("cannot consume", "no message came within a minute");
        if (message->err)
            fail("cannot consume", rd_kafka_message_errstr(message));
        write_message(expected, number);
        if (message->len != MESSAGE_BYTES || memcmp(message->payload, expected, MESSAGE_BYTES))
            fail("cannot consume", "a message is not the one that was sent");
        rd_kafka_message_destroy(message);
    }
    rd_kafka_consumer_close(client);
}

int main(int argc, char **argv) {
    long count = argc == 5 ? atol(argv[4]) : 0;
    int produces = argc == 5 && !strcmp(argv[1], "produce");
    if (count <= 0 || (!produces && strcmp(argv[1], "consume"))) {
        fprintf(stderr, "usage: kafka_client produce|consume BROKER TOPIC COUNT\n");
        return 2;
    }
    char why[512];
    long delivered = 0;
    rd_kafka_conf_t *settings = rd_kafka_conf_new();
    if (rd_kafka_conf_set(settings, "bootstrap.servers", argv[2], why, sizeof why) ||
        (!produces && rd_kafka_conf_set(settings, "group.id", "kafka_client", why, sizeof why)))
        fail("wrong setting", why);
    if (produces)
        rd_kafka_conf_set_dr_msg_cb(settings, on_delivery);
    rd_kafka_conf_set_opaque(settings, &delivered);
    rd_kafka_t *client = rd_kafka_new(produces ? RD_KAFKA_PRODUCER : RD_KAFKA_CONSUMER, settings,
                                      why, sizeof why);
    if (!client)
        fail("cannot start librdkafka", why);
    if (produces)
        produce(client, argv[3], count, &delivered);
    else
        consume(client, argv[3], count);
    rd_kafka_destroy(client);
    printf("%ld messages\n", count);
    return 0;
}
