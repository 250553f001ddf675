/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Definitions of the kernel's BPF interface, as far as the programs use them.
 *
 * Written out here so that the objects do not depend on installed headers: the
 * same compiler generates the same bytes on every machine.
 */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* Context of an XDP program (linux/bpf.h). */
struct xdp_md {
	u32 data;
	u32 data_end;
	u32 data_meta;
	u32 ingress_ifindex;
	u32 rx_queue_index;
	u32 egress_ifindex;
};

/* First fields of the context of a socket filter or a tc program (linux/bpf.h). */
struct __sk_buff {
	u32 len;
	u32 pkt_type;
	u32 mark;
	u32 queue_mapping;
	u32 protocol;
	u32 vlan_present;
	u32 vlan_tci;
};

/* Actions of a tc program: the next program decides, or the frame is dropped. */
enum { TCX_NEXT = -1, TCX_DROP = 2 };

enum { XDP_DROP = 1, XDP_PASS = 2, XDP_REDIRECT = 4 };

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_XSKMAP = 17,
};

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static long (*bpf_skb_load_bytes)(const void *skb, u32 offset, void *to, u32 len) = (void *)26;
/* Since Linux 5.18. */
static long (*bpf_xdp_load_bytes)(void *xdp, u32 offset, void *to, u32 len) = (void *)189;
static long (*bpf_redirect_map)(void *map, u64 key, u64 flags) = (void *)51;

#define SECTION(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

/* A map is described by the member types of a struct (BTF). */
#define NUMBER(name, value) int(*name)[value]
#define TYPE(name, value) typeof(value) *name

#define be16(x) ((u16)__builtin_bswap16(x))

INLINE u32 be32(const u8 *bytes)
{
	return (u32)bytes[0] << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
}

INLINE u64 be64(const u8 *bytes)
{
	return (u64)be32(bytes) << 32 | be32(bytes + 4);
}

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "built for little-endian targets only"
#endif
