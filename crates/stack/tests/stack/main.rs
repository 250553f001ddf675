//! The stack from outside: packets in, packets out, time moved by hand.

mod forward;
mod fragments;
mod hostile;
mod icmp;
mod kit;
mod loopback;
mod moving;
mod moving_rest;
mod neighbours;
mod path_mtu;
mod random;
mod tcp_calls;
mod tcp_goodput;
mod tcp_pair;
mod tcp_script;
mod tcp_scripts;
mod tcp_segmentation;
mod udp;
mod upgrade;
mod upgrade_rest;
