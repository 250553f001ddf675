//! The router of Mogul and Ramakrishnan, measured.

mod site;

pub use site::{LEFT_V4, LEFT_V6, RIGHT_V4, RIGHT_V6, ROUTER_LEFT, ROUTER_RIGHT, RouterSite};
