//! gRPC's standard health service (etcd: api.md 2). It knows one service, the empty name, and that serves from
//! the moment there is a connection to ask on.

use crate::proto::health as pb;
use futures::stream::{self, BoxStream, StreamExt};
use pb::health_check_response::ServingStatus;
use tonic::{Request, Response, Status};

#[derive(Clone, Copy, Debug)]
pub struct Health;

fn answer(status: ServingStatus) -> pb::HealthCheckResponse {
    pb::HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl pb::health_server::Health for Health {
    async fn check(
        &self,
        request: Request<pb::HealthCheckRequest>,
    ) -> Result<Response<pb::HealthCheckResponse>, Status> {
        match request.get_ref().service.as_str() {
            "" => Ok(Response::new(answer(ServingStatus::Serving))),
            _ => Err(Status::not_found("unknown service")),
        }
    }

    async fn list(
        &self,
        _: Request<pb::HealthListRequest>,
    ) -> Result<Response<pb::HealthListResponse>, Status> {
        let statuses = [(String::new(), answer(ServingStatus::Serving))].into();
        Ok(Response::new(pb::HealthListResponse { statuses }))
    }

    type WatchStream = BoxStream<'static, Result<pb::HealthCheckResponse, Status>>;

    /// One answer, and then the stream stays open: the status does not change before the connection ends.
    async fn watch(
        &self,
        request: Request<pb::HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let status = match request.get_ref().service.as_str() {
            "" => ServingStatus::Serving,
            _ => ServingStatus::ServiceUnknown,
        };
        let now = stream::iter([Ok(answer(status))]);
        Ok(Response::new(now.chain(stream::pending()).boxed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::executor::block_on;
    use pb::health_server::Health as _;

    #[test]
    fn only_the_empty_name_is_known() {
        let ask = |service: &str| Request::new(pb::HealthCheckRequest { service: service.into() });
        let status = block_on(Health.check(ask(""))).unwrap().into_inner().status;
        assert_eq!(status, ServingStatus::Serving as i32);
        let refused = block_on(Health.check(ask("etcdserverpb.KV"))).unwrap_err();
        assert_eq!((refused.code(), refused.message()), (tonic::Code::NotFound, "unknown service"));

        let mut watched = block_on(Health.watch(ask("x"))).unwrap().into_inner();
        let first = block_on(watched.next()).unwrap().unwrap().status;
        assert_eq!(first, ServingStatus::ServiceUnknown as i32);
        assert!(futures::FutureExt::now_or_never(watched.next()).is_none(), "the stream stays open");
    }
}
