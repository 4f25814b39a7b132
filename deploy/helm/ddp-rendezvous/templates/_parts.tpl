{{- define "labels" -}}
app.kubernetes.io/part-of: ddp-launch
{{- end }}

{{- define "labels.service" -}}
app.kubernetes.io/name: ddp-rendezvous
{{- end }}

{{- define "labels.etcd" -}}
app.kubernetes.io/name: ddp-rendezvous-etcd
{{- end }}

{{- define "labels.snapshot" -}}
app.kubernetes.io/name: ddp-rendezvous-etcd-snapshot
{{- end }}

{{- /* The digest wins over the tag; both may be set. */}}
{{- define "image" -}}
{{ .image.repository }}{{ with .image.tag | default .tag }}:{{ . }}{{ end }}{{ with .image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "etcd.managed" -}}
{{- if and (eq .Values.store.kind "etcd") .Values.store.etcd.managed }}yes{{ end }}
{{- end }}

{{- define "etcd.clientSecret" -}}
{{- if include "etcd.managed" . -}}
{{ .Values.etcd.tls.clientSecret | default "ddp-rendezvous-etcd-client-tls" }}
{{- else if eq .Values.store.kind "etcd" -}}
{{ .Values.store.etcd.secret }}
{{- end }}
{{- end }}

{{- define "etcd.endpoints" -}}
{{- if include "etcd.managed" . -}}
{{- range $i := until 3 }}{{ if $i }},{{ end }}ddp-rendezvous-etcd-{{ $i }}.ddp-rendezvous-etcd.{{ $.Release.Namespace }}.svc:2379{{ end }}
{{- else -}}
{{ join "," .Values.store.etcd.endpoints }}
{{- end }}
{{- end }}

{{- define "store" -}}
{{- $tls := "/etc/ddp-rendezvous/etcd-tls" -}}
{{- if eq .Values.store.kind "etcd" -}}
etcd://{{ include "etcd.endpoints" . }}/{{ .Values.store.etcd.prefix }}
{{- if include "etcd.clientSecret" . }}?tls=true&cacert={{ $tls }}/ca.crt&cert={{ $tls }}/tls.crt&key={{ $tls }}/tls.key{{ end }}
{{- else if eq .Values.store.kind "file" -}}
file:/var/lib/ddp-rendezvous/jobs.db
{{- else -}}
memory
{{- end }}
{{- end }}

{{- define "journals" -}}
{{- if and .Values.journals.enabled (ne .Values.store.kind "memory") }}yes{{ end }}
{{- end }}

{{- /* The name of the volume of each replica, if it has one. */}}
{{- define "volume" -}}
{{- if eq .Values.store.kind "file" -}}
state
{{- else if include "journals" . -}}
journals
{{- end }}
{{- end }}

{{- define "tls.own" -}}
{{- if and .Values.tls.enabled (not .Values.tls.secret) }}yes{{ end }}
{{- end }}

{{- define "issuer" -}}
{{- with .Values.tls.issuer -}}
name: {{ .name | default "ddp-rendezvous-ca" }}
kind: {{ .kind }}
group: {{ .group }}
{{- end }}
{{- end }}

{{- /* For every pod: the restricted pod security standard, and no API token. */}}
{{- define "pod" -}}
serviceAccountName: ddp-rendezvous
automountServiceAccountToken: false
enableServiceLinks: false  # variables of service links would be read as settings
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "container.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- /* At most one per node, evenly spread over zones if there are several. */}}
{{- define "apart" -}}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- . | nindent 12 }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- . | nindent 8 }}
{{- end }}

{{- define "claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}

{{- define "certificate.renewed" -}}
duration: 720h
renewBefore: 240h
privateKey:
  algorithm: ECDSA
  size: 256
  rotationPolicy: Always
{{- end }}

{{- /* A CA of this namespace. Its key stays the same when it is renewed, so the certificates that it signed stay valid. */}}
{{- define "authority" -}}
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  name: {{ . }}-self-signed
  labels:
    {{- include "labels" . | nindent 4 }}
spec:
  selfSigned: {}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ . }}-ca
  labels:
    {{- include "labels" . | nindent 4 }}
spec:
  isCA: true
  commonName: {{ . }} CA
  secretName: {{ . }}-ca
  duration: 87600h
  renewBefore: 8760h
  privateKey:
    algorithm: ECDSA
    size: 256
    rotationPolicy: Never
  issuerRef:
    name: {{ . }}-self-signed
    kind: Issuer
    group: cert-manager.io
---
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  name: {{ . }}-ca
  labels:
    {{- include "labels" . | nindent 4 }}
spec:
  ca:
    secretName: {{ . }}-ca
{{- end }}
