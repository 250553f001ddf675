/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Closed-loop TCP clients as one program on the clients' end of the link: the
 * frame of each response is rewritten to the next request and sent, at the cost of
 * neither a socket nor a copy. So no request is longer than its response.
 *
 * The program neither opens nor closes connections, sends no first request, and
 * retransmits nothing: src/load/bpf_client.rs does, which defines the same
 * layouts.
 */
#include "packet.h"

/* Maximum connections, and maximum bytes of a request and a compared response. */
#define MAX_CONNECTIONS 1024
#define MAX_BYTES 128
#define WORDS (MAX_BYTES / 8)
/* Latency histogram: number of buckets per power of two, as a power of two. */
#define PARTS_BITS 5
#define BUCKETS (64 << PARTS_BITS)

enum { FIN = 1, SYN = 2, RST = 4, PSH = 8, ACK = 16 };
enum { NO_OPTIONS = 5 << 4 };

static long (*bpf_redirect)(u32 interface, u64 flags) = (void *)23;
static long (*bpf_xdp_adjust_tail)(struct xdp_md *context, int delta) = (void *)65;
static long (*bpf_xdp_store_bytes)(struct xdp_md *context, u32 at, void *from, u32 size) =
	(void *)190;

struct tcp {
	u16 source;
	u16 destination;
	u8 sequence[4];
	u8 acknowledgement[4];
	u8 offset;
	u8 flags;
	u16 window;
	u16 checksum;
	u16 urgent;
} __attribute__((packed));

struct frame {
	struct ethernet ethernet;
	struct ipv4 ip;
	struct tcp tcp;
} __attribute__((packed));

struct settings {
	/* First local port of the connections; the others follow. */
	u32 first_port;
	u32 connections;
	u32 question_bytes;
	u32 answer_bytes;
	/* Checksum of the request: 16-bit words in host order, folded. */
	u32 question_sum;
	/* Compare the responses. */
	u32 compares;
	/* Both padded with zeros. */
	u8 question[MAX_BYTES];
	u64 answer[WORDS];
};

enum { CLOSED, CONNECTING, ASKING, BROKEN };

struct connection {
	u32 state;
	/* Sequence number after the last byte sent. */
	u32 sent;
	/* Sequence number after the last byte received. */
	u32 received;
	/* Bytes received of an incomplete response. */
	u32 part;
	u64 asked_ns;
	u64 answers;
	u64 wrong;
};

struct words {
	u64 at[WORDS];
};

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct settings);
} settings SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, MAX_CONNECTIONS);
	TYPE(key, u32);
	TYPE(value, struct connection);
} connections SECTION(".maps");

/* Latency histogram of the responses. */
struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, BUCKETS);
	TYPE(key, u32);
	TYPE(value, u64);
} latencies SECTION(".maps");

/* The response that is being compared. */
struct {
	NUMBER(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct words);
} seen SECTION(".maps");

INLINE void put32(u8 *bytes, u32 value)
{
	*(u32 *)bytes = __builtin_bswap32(value);
}

INLINE u16 fold(u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* Sum of the 16-bit words, in host order, between two positions of a frame. */
#define SUM(from, to)                                                        \
	({                                                                   \
		const u16 *word;                                             \
		u32 sum = 0;                                                 \
		_Pragma("unroll") for (word = (void *)(from);                \
				       word < (const u16 *)(void *)(to);     \
				       word++) sum += *word;                 \
		sum;                                                         \
	})

INLINE void note_latency(u64 ns)
{
	u32 octave = 0, bucket;
	u64 *count;
	int shift;

	/* As in a floating-point number: an exponent, and the leading bits. */
#pragma unroll
	for (shift = 32; shift > 0; shift /= 2) {
		if (ns >> shift >= 1 << PARTS_BITS) {
			ns >>= shift;
			octave += shift;
		}
	}
	bucket = (octave << PARTS_BITS) + ns;
	count = bpf_map_lookup_elem(&latencies, &bucket);
	if (count)
		__sync_fetch_and_add(count, 1);
}

/* Compares a response that arrived in one segment. */
INLINE int is_right(struct xdp_md *context, u32 at, const struct settings *set)
{
	u32 zero = 0, bytes = set->answer_bytes;
	struct words *answer = bpf_map_lookup_elem(&seen, &zero);
	u64 wrong = 0;
	int word;

	if (!answer || bytes < 1 || bytes > MAX_BYTES)
		return 0;
	/* The map's bytes after the response are zero: all responses are as long. */
	if (bpf_xdp_load_bytes(context, at, answer, bytes))
		return 0;
#pragma unroll
	for (word = 0; word < WORDS; word++)
		wrong |= answer->at[word] ^ set->answer[word];
	return wrong == 0;
}

/* Rewrites the last frame to the next request and sends it. */
INLINE int ask(struct xdp_md *context, const struct settings *set, struct connection *connection)
{
	u32 bytes = set->question_bytes, have = context->data_end - context->data;
	struct frame *frame;
	u8 address[6];
	u16 port;
	u32 sum;

	if (bytes < 1 || bytes > MAX_BYTES ||
	    bpf_xdp_adjust_tail(context, (int)(sizeof(*frame) + bytes - have)) ||
	    bpf_xdp_store_bytes(context, sizeof(*frame), (void *)set->question, bytes))
		return XDP_DROP;
	frame = (void *)(long)context->data;
	if ((void *)(frame + 1) > (void *)(long)context->data_end)
		return XDP_DROP;
	__builtin_memcpy(address, frame->ethernet.source, 6);
	__builtin_memcpy(frame->ethernet.source, frame->ethernet.destination, 6);
	__builtin_memcpy(frame->ethernet.destination, address, 6);
	frame->ip.traffic_class = 0;
	frame->ip.total_length = be16(sizeof(struct ipv4) + sizeof(struct tcp) + bytes);
	frame->ip.identification = 0;
	frame->ip.fragment = be16(0x4000);
	frame->ip.ttl = 64;
	frame->ip.checksum = 0;
	__builtin_memcpy(address, frame->ip.source, 4);
	__builtin_memcpy(frame->ip.source, frame->ip.destination, 4);
	__builtin_memcpy(frame->ip.destination, address, 4);
	frame->ip.checksum = fold(SUM(&frame->ip, &frame->tcp));
	port = frame->tcp.source;
	frame->tcp.source = frame->tcp.destination;
	frame->tcp.destination = port;
	put32(frame->tcp.sequence, connection->sent);
	put32(frame->tcp.acknowledgement, connection->received);
	frame->tcp.offset = NO_OPTIONS;
	frame->tcp.flags = PSH | ACK;
	frame->tcp.window = 0xffff;
	frame->tcp.checksum = 0;
	frame->tcp.urgent = 0;
	sum = SUM(frame->ip.source, frame + 1) + set->question_sum;
	sum += be16(PROTOCOL_TCP) + be16(sizeof(struct tcp) + bytes);
	frame->tcp.checksum = fold(sum);
	connection->sent += bytes;
	connection->part = 0;
	connection->asked_ns = bpf_ktime_get_ns();
	/* XDP_TX would not wake a veth whose peer has no program. */
	return bpf_redirect(context->ingress_ifindex, 0);
}

/* Processes `bytes` bytes of a response, at offset `at`. */
INLINE int answered(struct xdp_md *context, const struct settings *set,
		    struct connection *connection, u32 at, u32 bytes)
{
	u32 part = connection->part + bytes;

	connection->received += bytes;
	connection->part = part;
	if (part < set->answer_bytes)
		return XDP_DROP;
	if (part > set->answer_bytes ||
	    (set->compares && bytes == part && !is_right(context, at, set))) {
		connection->wrong++;
		connection->state = BROKEN;
		return XDP_DROP;
	}
	note_latency(bpf_ktime_get_ns() - connection->asked_ns);
	connection->answers++;
	return ask(context, set, connection);
}

SECTION("xdp")
int asker(struct xdp_md *context)
{
	struct frame *frame = (void *)(long)context->data;
	struct connection *connection;
	struct settings *set;
	u32 zero = 0, number, at, end;

	if ((void *)(frame + 1) > (void *)(long)context->data_end)
		return XDP_PASS;
	set = bpf_map_lookup_elem(&settings, &zero);
	if (!set || frame->ethernet.type != be16(ETHERTYPE_IPV4) ||
	    frame->ip.version_and_length != 0x45 || frame->ip.protocol != PROTOCOL_TCP)
		return XDP_PASS;
	number = be16(frame->tcp.destination) - set->first_port;
	if (number >= set->connections)
		return XDP_PASS;
	connection = bpf_map_lookup_elem(&connections, &number);
	if (!connection)
		return XDP_PASS;
	if (frame->tcp.flags & (FIN | RST)) {
		if (connection->state != CLOSED)
			connection->state = BROKEN;
		return XDP_DROP;
	}
	if (frame->tcp.flags & SYN) {
		if (connection->state != CONNECTING || be32(frame->tcp.acknowledgement) != connection->sent)
			return XDP_DROP;
		/* This frame has no space for the first request. */
		connection->received = be32(frame->tcp.sequence) + 1;
		connection->sent += set->question_bytes;
		connection->asked_ns = bpf_ktime_get_ns();
		connection->state = ASKING;
		return XDP_DROP;
	}
	at = sizeof(struct ethernet) + sizeof(struct ipv4) + (frame->tcp.offset >> 4) * 4;
	end = sizeof(struct ethernet) + be16(frame->ip.total_length);
	/* Retransmitted and out-of-order segments are ignored: time-outs recover. */
	if (connection->state != ASKING || end <= at ||
	    be32(frame->tcp.sequence) != connection->received)
		return XDP_DROP;
	return answered(context, set, connection, at, end - at);
}

static const char license_text[] SECTION("license") = "MIT";
