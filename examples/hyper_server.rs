//! Web server on tokio and hyper, neither of which knows of Tidegate.
//!
//! As root: `cargo run --release -p tidegate --example hyper_server -- eth0 192.0.2.7/24`; then on
//! another machine `curl http://192.0.2.7/`.

use std::convert::Infallible;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, body::Incoming};
use hyper_util::rt::TokioIo;
use tidegate::device::xdp::XdpConfig;
use tidegate::tokio::{TcpListener, drive};
use tidegate::{IpCidr, Net, NetConfig};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let usage = "usage: hyper_server INTERFACE ADDRESS/BITS";
    let mut arguments = std::env::args().skip(1);
    let interface = arguments.next().ok_or(usage)?;
    let address: IpCidr = arguments.next().ok_or(usage)?.parse()?;

    let net = Net::open(NetConfig::new(XdpConfig::new(interface)).address(address))?;
    let listener = TcpListener::bind(&net, (address.address(), 80))?;
    net.wait_for_addresses()?;
    // The task that runs the stack for all futures.
    tokio::spawn(drive(net));
    println!("ready");
    loop {
        let (stream, _) = listener.accept().await?;
        let connection =
            http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(answer));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                println!("{error}");
            }
        });
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<String>, Infallible> {
    Ok(Response::new(format!("you asked for {}\n", request.uri())))
}
