// Echo, sink and source server on lwIP, which never sleeps: a peer of `tidegate-lab peers`.
//
// --iface NAME --address ADDRESS/BITS --port NUMBER --role echo|sink|source --connections COUNT
//
// The stack runs in this thread alone, by its raw interface. Frames are received and sent in
// batches on a packet socket, as Tidegate's own device does. lwIP needs no number of connections.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "lwip/etharp.h"
#include "lwip/ethip6.h"
#include "lwip/init.h"
#include "lwip/netif.h"
#include "lwip/tcp.h"
#include "lwip/timeouts.h"
#include "lwip/udp.h"
#include "netif/ethernet.h"

// Maximum number of frames in one system call.
#define BATCH_FRAMES 64
// Bytes of a buffer: a frame of 1,500 bytes of payload, and some.
#define BUFFER_BYTES 1600
// Bytes that the socket holds.
#define SOCKET_BYTES (4 << 20)

enum role { ECHO, SINK, SOURCE };

struct batch {
    struct mmsghdr headers[BATCH_FRAMES];
    struct iovec vectors[BATCH_FRAMES];
};

static enum role role;
static int packet_socket;
static unsigned char mac[6];
// Frames are received into packet buffers of the stack.
static struct batch received;
static struct pbuf *receive_buffers[BATCH_FRAMES];
static struct batch staged;
static unsigned char staged_buffers[BATCH_FRAMES][BUFFER_BYTES];
static int staged_count;
// Bytes that a source sends.
static unsigned char bytes_out[0xffff];

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static void point(struct batch *batch, int at, void *buffer) {
    batch->vectors[at] = (struct iovec){.iov_base = buffer, .iov_len = BUFFER_BYTES};
    batch->headers[at].msg_hdr.msg_iov = &batch->vectors[at];
    batch->headers[at].msg_hdr.msg_iovlen = 1;
}

static void set_option(int level, int option, int value) {
    if (setsockopt(packet_socket, level, option, &value, sizeof value) < 0)
        fail("cannot set an option of the packet socket");
}

static void open_socket(const char *interface) {
    struct sockaddr_ll address = {
        .sll_family = AF_PACKET,
        .sll_protocol = htons(ETH_P_ALL),
        .sll_ifindex = if_nametoindex(interface),
    };
    socklen_t len = sizeof address;
    if (address.sll_ifindex == 0)
        fail(interface);
    packet_socket = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (packet_socket < 0)
        fail("cannot open a packet socket");
    set_option(SOL_SOCKET, SO_RCVBUFFORCE, SOCKET_BYTES);
    set_option(SOL_SOCKET, SO_SNDBUFFORCE, SOCKET_BYTES);
    set_option(SOL_PACKET, PACKET_QDISC_BYPASS, 1);
    set_option(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1);
    if (bind(packet_socket, (struct sockaddr *)&address, len) < 0
        || getsockname(packet_socket, (struct sockaddr *)&address, &len) < 0)
        fail("cannot bind the packet socket");
    memcpy(mac, address.sll_addr, sizeof mac);
    for (int at = 0; at < BATCH_FRAMES; at++)
        point(&staged, at, staged_buffers[at]);
}

// Sends the batch. A frame that the kernel does not take is lost, as on a wire.
static void flush(void) {
    for (int sent = 0; sent < staged_count;) {
        int result = sendmmsg(packet_socket, &staged.headers[sent], staged_count - sent, MSG_DONTWAIT);
        sent += result > 0 ? result : 1;
    }
    staged_count = 0;
}

static err_t stage(struct netif *netif, struct pbuf *packet) {
    (void)netif;
    staged.vectors[staged_count].iov_len =
        pbuf_copy_partial(packet, staged_buffers[staged_count], BUFFER_BYTES, 0);
    if (++staged_count == BATCH_FRAMES)
        flush();
    return ERR_OK;
}

// Gives a place of the receive batch a buffer, in place of the one that the stack has taken.
static void renew(int at) {
    receive_buffers[at] = pbuf_alloc(PBUF_RAW, BUFFER_BYTES, PBUF_RAM);
    if (!receive_buffers[at])
        fail("no memory for a packet");
    point(&received, at, receive_buffers[at]->payload);
}

static void receive(struct netif *netif) {
    int count = recvmmsg(packet_socket, received.headers, BATCH_FRAMES, MSG_DONTWAIT, NULL);
    if (count < 0 && errno != EAGAIN && errno != EINTR)
        fail("cannot receive");
    for (int at = 0; at < count; at++) {
        struct pbuf *packet = receive_buffers[at];
        packet->len = packet->tot_len = received.headers[at].msg_len;
        if (netif->input(packet, netif) != ERR_OK)
            pbuf_free(packet);
        renew(at);
    }
}

static err_t init_interface(struct netif *netif) {
    netif->name[0] = 't';
    netif->name[1] = 'g';
    netif->mtu = 1500;
    netif->hwaddr_len = sizeof mac;
    memcpy(netif->hwaddr, mac, sizeof mac);
    netif->flags = NETIF_FLAG_BROADCAST | NETIF_FLAG_ETHARP | NETIF_FLAG_ETHERNET | NETIF_FLAG_MLD6;
    netif->output = etharp_output;
    netif->output_ip6 = ethip6_output;
    netif->linkoutput = stage;
    return ERR_OK;
}

static void add_interface(struct netif *netif, char *text) {
    ip_addr_t address;
    char *bits = strchr(text, '/');
    if (bits)
        *bits++ = 0;
    if (!bits || !ipaddr_aton(text, &address)) {
        fprintf(stderr, "--address is an address and a prefix length, not %s\n", text);
        exit(2);
    }
    netif_add_noaddr(netif, NULL, init_interface, ethernet_input);
    netif_set_default(netif);
    if (IP_IS_V6(&address)) {
        netif_ip6_addr_set(netif, 0, ip_2_ip6(&address));
        netif_ip6_addr_set_state(netif, 0, IP6_ADDR_PREFERRED);
    } else {
        ip4_addr_t mask = {.addr = htonl(~0U << (32 - atoi(bits)))}, gateway = {0};
        netif_set_addr(netif, ip_2_ip4(&address), &mask, &gateway);
    }
    netif_set_up(netif);
    netif_set_link_up(netif);
}

// Echoes what a connection has received, as far as it fits into its send buffer. `argument` of a
// connection is the chain of what is left.
static struct pbuf *echo(struct tcp_pcb *pcb, struct pbuf *left) {
    while (left && left->len <= tcp_sndbuf(pcb)
           && tcp_write(pcb, left->payload, left->len, TCP_WRITE_FLAG_COPY) == ERR_OK) {
        struct pbuf *done = left;
        tcp_recved(pcb, done->len);
        left = done->next;
        if (left)
            pbuf_ref(left);
        pbuf_free(done);
    }
    tcp_arg(pcb, left);
    return left;
}

static void fill(struct tcp_pcb *pcb) {
    u16_t len;
    while ((len = LWIP_MIN(tcp_sndbuf(pcb), sizeof bytes_out)) > 0
           && tcp_sndqueuelen(pcb) < TCP_SND_QUEUELEN
           && tcp_write(pcb, bytes_out, len, 0) == ERR_OK) {}
}

static err_t on_sent(void *left, struct tcp_pcb *pcb, u16_t len) {
    (void)len;
    if (role == SOURCE)
        fill(pcb);
    else
        echo(pcb, left);
    return ERR_OK;
}

static void on_error(void *left, err_t error) {
    (void)error;
    if (left)
        pbuf_free(left);
}

static err_t on_received(void *left, struct tcp_pcb *pcb, struct pbuf *packet, err_t error) {
    (void)error;
    if (!packet) {
        tcp_err(pcb, NULL);
        if (left)
            pbuf_free(left);
        tcp_arg(pcb, NULL);
        return tcp_close(pcb);
    }
    if (role == ECHO) {
        if (left)
            pbuf_cat(left, packet);
        echo(pcb, left ? left : packet);
    } else {
        tcp_recved(pcb, packet->tot_len);
        pbuf_free(packet);
    }
    return ERR_OK;
}

static err_t on_accepted(void *argument, struct tcp_pcb *pcb, err_t error) {
    (void)argument;
    if (error != ERR_OK || !pcb)
        return ERR_VAL;
    tcp_nagle_disable(pcb);
    tcp_arg(pcb, NULL);
    tcp_recv(pcb, on_received);
    tcp_sent(pcb, on_sent);
    tcp_err(pcb, on_error);
    if (role == SOURCE) {
        fill(pcb);
        tcp_output(pcb);
    }
    return ERR_OK;
}

static void on_datagram(void *argument, struct udp_pcb *pcb, struct pbuf *packet,
                        const ip_addr_t *from, u16_t port) {
    (void)argument;
    // A datagram that cannot be sent is lost.
    udp_sendto(pcb, packet, from, port);
    pbuf_free(packet);
}

static void listen_on(u16_t port) {
    struct tcp_pcb *pcb = tcp_new_ip_type(IPADDR_TYPE_ANY);
    if (!pcb || tcp_bind(pcb, IP_ANY_TYPE, port) != ERR_OK)
        fail("cannot bind the TCP port");
    pcb = tcp_listen(pcb);
    if (!pcb)
        fail("cannot listen");
    tcp_accept(pcb, on_accepted);
    if (role == ECHO) {
        struct udp_pcb *udp = udp_new_ip_type(IPADDR_TYPE_ANY);
        if (!udp || udp_bind(udp, IP_ANY_TYPE, port) != ERR_OK)
            fail("cannot bind the UDP port");
        udp_recv(udp, on_datagram, NULL);
    }
}

static enum role parse_role(const char *text) {
    if (strcmp(text, "echo") == 0)
        return ECHO;
    if (strcmp(text, "sink") == 0)
        return SINK;
    if (strcmp(text, "source") == 0)
        return SOURCE;
    fprintf(stderr, "--role is echo, sink or source, not %s\n", text);
    exit(2);
}

int main(int count, char **arguments) {
    static const struct option options[] = {
        {"iface", required_argument, NULL, 'i'}, {"address", required_argument, NULL, 'a'},
        {"port", required_argument, NULL, 'p'},  {"role", required_argument, NULL, 'r'},
        {"connections", required_argument, NULL, 'c'}, {0},
    };
    char *interface = NULL, *address = NULL;
    int port = 0, option;
    while ((option = getopt_long(count, arguments, "", options, NULL)) != -1) {
        switch (option) {
        case 'i': interface = optarg; break;
        case 'a': address = optarg; break;
        case 'p': port = atoi(optarg); break;
        case 'r': role = parse_role(optarg); break;
        case 'c': break;
        default: return 2;
        }
    }
    if (!interface || !address || port <= 0) {
        fprintf(stderr, "--iface, --address and --port are needed\n");
        return 2;
    }
    static struct netif netif;
    lwip_init();
    open_socket(interface);
    for (int at = 0; at < BATCH_FRAMES; at++)
        renew(at);
    add_interface(&netif, address);
    listen_on(port);
    puts("ready");
    fflush(stdout);
    for (;;) {
        receive(&netif);
        sys_check_timeouts();
        flush();
    }
}
