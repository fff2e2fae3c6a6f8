//! Compiles `proto/` with a compiler written in Rust, so that a build needs no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["etcdserverpb.proto", "v3electionpb.proto", "v3lockpb.proto", "health.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .build_client(true)
        .build_transport(false)
        .bytes(".")
        .codec_path("crate::proto::Codec")
        .compile_fds(descriptors)?;
    Ok(())
}
