//! The Cluster service. Members are listed; changing them is not offered yet.

use super::node::Node;
use super::{status, unimplemented};
use crate::model;
use crate::proto::etcdserverpb as pb;
use tonic::{Request, Response, Status};

#[derive(Clone, Debug)]
pub struct Cluster<N> {
    node: N,
}

impl<N: Node> Cluster<N> {
    pub fn new(node: N) -> Self {
        Cluster { node }
    }
}

fn unknown<T>(method: &str) -> Result<Response<T>, Status> {
    Err(unimplemented::method("etcdserverpb.Cluster", method))
}

#[tonic::async_trait]
impl<N: Node> pb::cluster_server::Cluster for Cluster<N> {
    async fn member_list(
        &self,
        request: Request<pb::MemberListRequest>,
    ) -> Result<Response<pb::MemberListResponse>, Status> {
        let linearizable = request.into_inner().linearizable;
        match self.node.call(model::Request::MemberList { linearizable }).await.map_err(status::of)? {
            model::Response::MemberList(response) => Ok(Response::new(response)),
            other => unreachable!("MemberList was answered with {other:?}"),
        }
    }

    async fn member_add(
        &self,
        _: Request<pb::MemberAddRequest>,
    ) -> Result<Response<pb::MemberAddResponse>, Status> {
        unknown("MemberAdd")
    }

    async fn member_remove(
        &self,
        _: Request<pb::MemberRemoveRequest>,
    ) -> Result<Response<pb::MemberRemoveResponse>, Status> {
        unknown("MemberRemove")
    }

    async fn member_update(
        &self,
        _: Request<pb::MemberUpdateRequest>,
    ) -> Result<Response<pb::MemberUpdateResponse>, Status> {
        unknown("MemberUpdate")
    }

    async fn member_promote(
        &self,
        _: Request<pb::MemberPromoteRequest>,
    ) -> Result<Response<pb::MemberPromoteResponse>, Status> {
        unknown("MemberPromote")
    }
}
