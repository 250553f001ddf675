//! Tests of the stack from outside: packets in, packets out, on a virtual clock.

mod forward;
mod fragments;
mod hostile;
mod icmp;
mod kit;
mod loopback;
mod migration;
mod migration_udp_and_limits;
mod neighbours;
mod own_addresses;
mod path_mtu;
mod random_input;
mod tcp_api;
mod tcp_buffers;
mod tcp_goodput;
mod tcp_pair;
mod tcp_pressure;
mod tcp_script;
mod tcp_script_cases;
mod tcp_segmentation;
mod tcp_unreachable;
mod transmit_classes;
mod udp;
mod upgrade;
mod upgrade_udp_and_limits;
