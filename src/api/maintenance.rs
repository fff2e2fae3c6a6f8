//! The Maintenance service: Status, HashKV and Defragment (etcd: semantics 11.5 to 11.7). The rest is not
//! offered yet.

use super::node::Node;
use super::{status, unimplemented};
use crate::model;
use crate::proto::etcdserverpb as pb;
use futures::stream::BoxStream;
use tonic::{Request, Response, Status};

#[derive(Clone, Debug)]
pub struct Maintenance<N> {
    node: N,
}

impl<N: Node> Maintenance<N> {
    pub fn new(node: N) -> Self {
        Maintenance { node }
    }
}

fn unknown<T>(method: &str) -> Result<Response<T>, Status> {
    Err(unimplemented::method("etcdserverpb.Maintenance", method))
}

#[tonic::async_trait]
impl<N: Node> pb::maintenance_server::Maintenance for Maintenance<N> {
    async fn status(&self, _: Request<pb::StatusRequest>) -> Result<Response<pb::StatusResponse>, Status> {
        match self.node.call(model::Request::Status).await.map_err(status::of)? {
            model::Response::Status(response) => Ok(Response::new(response)),
            other => unreachable!("Status was answered with {other:?}"),
        }
    }

    async fn hash_kv(
        &self,
        request: Request<pb::HashKvRequest>,
    ) -> Result<Response<pb::HashKvResponse>, Status> {
        match self.node.call(model::Request::HashKv(request.into_inner())).await.map_err(status::of)? {
            model::Response::HashKv(response) => Ok(Response::new(response)),
            other => unreachable!("HashKV was answered with {other:?}"),
        }
    }

    /// The answer has no header (etcd: trap F11).
    async fn defragment(
        &self,
        _: Request<pb::DefragmentRequest>,
    ) -> Result<Response<pb::DefragmentResponse>, Status> {
        match self.node.call(model::Request::Defragment).await.map_err(status::of)? {
            model::Response::Defragment => Ok(Response::new(pb::DefragmentResponse { header: None })),
            other => unreachable!("Defragment was answered with {other:?}"),
        }
    }

    async fn alarm(&self, _: Request<pb::AlarmRequest>) -> Result<Response<pb::AlarmResponse>, Status> {
        unknown("Alarm")
    }

    async fn hash(&self, _: Request<pb::HashRequest>) -> Result<Response<pb::HashResponse>, Status> {
        unknown("Hash")
    }

    type SnapshotStream = BoxStream<'static, Result<pb::SnapshotResponse, Status>>;

    async fn snapshot(
        &self,
        _: Request<pb::SnapshotRequest>,
    ) -> Result<Response<Self::SnapshotStream>, Status> {
        unknown("Snapshot")
    }

    async fn move_leader(
        &self,
        _: Request<pb::MoveLeaderRequest>,
    ) -> Result<Response<pb::MoveLeaderResponse>, Status> {
        unknown("MoveLeader")
    }

    async fn downgrade(
        &self,
        _: Request<pb::DowngradeRequest>,
    ) -> Result<Response<pb::DowngradeResponse>, Status> {
        unknown("Downgrade")
    }
}
